"""Every command that a client can send, how its answer is judged, and a tally of the answers."""

from __future__ import annotations

import asyncio
import itertools
import re
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from rollout import ConfigError, EngineStateError, InvalidRequestError, WeightUpdateError
from rollout.coordinator.client.inference_client import InferenceClient
from rollout.errors import CoordinatorLostError, RequestAbortedError, RolloutError
from rollout.weights.source import WeightsSource
from rollout.weights.transports.shared import SharedTransport
from tests.coordinator.live_fleet import model

CommandFuture = asyncio.Future[Any]
# What a busy machine may add to a deadline before it counts as missed.
SLACK_S = 30.0


@dataclass(frozen=True)
class CommandSender:
    """A client and the weights that it can point to."""

    client: InferenceClient
    good: WeightsSource
    bad: WeightsSource

    def send(self, name: str, deadline_s: float) -> CommandFuture:
        """Return the future of a command, which fails where the client refuses an argument."""
        try:
            return COMMANDS[name](self, deadline_s)
        except ConfigError as error:
            refused: CommandFuture = asyncio.get_running_loop().create_future()
            refused.set_exception(error)
            return refused


def publish(publisher: SharedTransport) -> WeightsSource:
    """The weights that all engines have: with them tokens stay what they are."""
    source = publisher.publish(dict(model().named_parameters()))
    publisher.commit()
    return source


def publish_incomplete(publisher: SharedTransport) -> WeightsSource:
    """All weights but the first."""
    source = publisher.publish(dict(list(model().named_parameters())[1:]))
    publisher.commit()
    return source


def _suspend(**arguments: Any) -> Callable[[CommandSender, float], CommandFuture]:
    return lambda sender, s: sender.client.suspend_engines(**arguments, deadline_s=s)


def _resume(only: str | None = None) -> Callable[[CommandSender, float], CommandFuture]:
    return lambda sender, s: sender.client.resume_engines(only, deadline_s=s)


def _epoch(version: Any) -> Callable[[CommandSender, float], CommandFuture]:
    return lambda sender, s: sender.client.set_generation_epoch(version, deadline_s=s)


def _update(
    name: str = "good", **arguments: Any
) -> Callable[[CommandSender, float], CommandFuture]:
    return lambda sender, s: sender.client.update_weights(
        getattr(sender, name), **arguments, deadline_s=s
    )


BOTH = ("kv_cache", "weights")
# Versions that nobody has set before: between two of them there are fewer updates than that.
_EPOCHS = itertools.count(1000, 1000)
COMMANDS: Mapping[str, Callable[[CommandSender, float], CommandFuture]] = MappingProxyType(
    {
        "pause": lambda sender, s: sender.client.pause_engines(deadline_s=s),
        "unpause": lambda sender, s: sender.client.unpause_engines(deadline_s=s),
        "suspend": _suspend(),
        "suspend persist": _suspend(mode="persist"),
        "suspend offload": _suspend(mode="offload"),
        "suspend recompute": _suspend(mode="recompute"),
        "suspend kv": _suspend(mode="offload", release=("kv_cache",)),
        "suspend weights": _suspend(release=("weights",)),
        "suspend both": _suspend(mode="recompute", release=BOTH),
        "suspend nothing": _suspend(release=()),
        "suspend discarding": _suspend(release=BOTH, discard_weights=True),
        "suspend badly": _suspend(release=("no such resource",)),
        "suspend in no mode": _suspend(mode="sleepy"),
        "suspend discarding kept": _suspend(discard_weights=True),
        "resume": _resume(),
        "resume kv": _resume("kv_cache"),
        "resume weights": _resume("weights"),
        "resume badly": _resume("no such resource"),
        "epoch": lambda sender, s: sender.client.set_generation_epoch(next(_EPOCHS), deadline_s=s),
        "epoch backwards": _epoch(0),
        "epoch of words": _epoch("seven"),
        "increment": lambda sender, s: sender.client.increment_staleness(deadline_s=s),
        "update": _update(),
        "update in flight": _update(in_flight=True),
        "update backwards": _update(version=0),
        "update incomplete": _update("bad"),
        "update in flight incomplete": _update("bad", in_flight=True),
        "stats": lambda sender, s: sender.client.engine_stats(deadline_s=s),
        "stop": lambda sender, s: sender.client.stop_engines(deadline_s=s),
        "shutdown": lambda sender, s: sender.client.shutdown_engines(deadline_s=s),
    }
)
FINAL = ("stop", "shutdown")
# ---- answers

_NAMES_STATE = re.compile(r"\b(RUNNING|PAUSED|SUSPENDED|STOPPED|STOPPING)\b")


def kind_of(error: BaseException) -> str:
    """Return why a command was refused. Raises AssertionError for an unclear reason."""
    text = str(error)
    if isinstance(error, EngineStateError):
        if "legal commands" in text and _NAMES_STATE.search(text):
            return "state"
        if "in time" in text:
            return "deadline"
        if "commit a full update first" in text or "resume(only='weights') first" in text:
            return "weights away"
    if isinstance(error, (ConfigError, InvalidRequestError)) and "must be" in text:
        return "argument"
    if isinstance(error, ConfigError) and "discard_weights=True needs" in text:
        return "argument"
    if isinstance(error, WeightUpdateError):
        return "weights"
    if isinstance(error, (CoordinatorLostError, RequestAbortedError)):
        return "the end"
    raise AssertionError(f"refused without a clear reason: {error!r}")


@dataclass
class Tally:
    """The number of done commands, and of refused ones by reason."""

    num_done: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    slowest_s: float = 0.0
    slowest: str = ""

    @property
    def num_commands(self) -> int:
        return self.num_done + self.refused.total()

    async def answer(self, future: CommandFuture, name: str, deadline_s: float) -> str:
        """How the command ended: "done", or why it was refused. It must end within its deadline."""
        start = time.monotonic()
        await asyncio.wait([future], timeout=deadline_s + SLACK_S)
        seconds = time.monotonic() - start
        assert future.done(), f"{name}: no answer after {seconds:.1f} s"
        if seconds > self.slowest_s:
            self.slowest_s, self.slowest = seconds, name
        error = future.exception()
        if error is None:
            self.num_done += 1
            return "done"
        return self.refuse(error)

    def refuse(self, error: BaseException) -> str:
        kind = kind_of(error)
        self.refused[kind] += 1
        return kind

    async def send(self, sender: CommandSender, name: str, deadline_s: float) -> str:
        try:
            future = sender.send(name, deadline_s)
        except RolloutError as error:  # a coordinator that has gone is known at once
            return self.refuse(error)
        return await self.answer(future, name, deadline_s)

    def __str__(self) -> str:
        refused = ", ".join(f"{num} {kind}" for kind, num in self.refused.most_common())
        return (
            f"{self.num_commands} commands: {self.num_done} done, {self.refused.total()} refused "
            f"({refused}); slowest answer {self.slowest_s:.3f} s ({self.slowest})"
        )
