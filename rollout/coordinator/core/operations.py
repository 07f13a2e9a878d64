"""Operation: what one command does with all engines. It asks each, waits for each, and says how it
ended."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from msgspec import structs

from rollout.coordinator.core.fleet import (
    CommittedWeights,
    name_of,
    next_epoch,
    state_after,
)
from rollout.coordinator.core.registry import Registry
from rollout.coordinator.core.sessions import EngineSession
from rollout.coordinator.protocol.headers import Headers
from rollout.coordinator.protocol.messages import (
    COMMAND_TYPES,
    Ack,
    Command,
    Message,
    Nack,
    UpdateWeights,
    WireError,
)
from rollout.errors import EngineStateError

logger = logging.getLogger(__name__)


class Operation:
    """The same command to every engine, which changes nothing by itself: STATS. Others build on it.

    `outcome` is None until it has ended, then its result or the error to raise at the client.
    `members` are the engines asked, by id; `waiting` those that have not answered. An engine that
    is removed meanwhile is neither, and its rank is among `lost_ranks`.
    """

    ending = "ask again"

    def __init__(
        self, registry: Registry, message: Command | UpdateWeights, deadline_at: float
    ) -> None:
        self.registry, self.fleet = registry, registry.fleet
        self.message, self.deadline_at = message, deadline_at
        self.name = name_of(message)
        self.command_id = next(self.fleet.command_ids)
        self.outcome: Mapping[str, Any] | WireError | None = None
        self.members: dict[bytes, EngineSession] = {}
        self.waiting: dict[bytes, EngineSession] = {}
        self.lost_ranks: list[int] = []
        self.results: dict[int, Mapping[str, Any]] = {}
        self.refusals: dict[int, WireError] = {}  # by rank, the first one first

    def begin(self, now: float) -> None:
        """Ask the engines."""
        seconds_left = self.deadline_at - now
        own = structs.replace(self.message, command_id=self.command_id, deadline_s=seconds_left)
        self.ask(self.registry.ready_engines(), own, now)

    def complete(self, now: float) -> None:
        """All members have answered."""
        self.end()

    def timed_out(self, now: float) -> None:
        """The deadline has passed, with members that have not answered."""
        self.end_unanswered(self.stop_waiting_for_all(now), self.ending)

    def answered(self, engine: EngineSession, answer: Ack | Nack, now: float) -> None:
        """A member that was waited for has answered."""
        self.stop_waiting(engine, now)
        if isinstance(answer, Ack):
            self.results[engine.rank] = answer.result
        else:
            why = answer.error.message or answer.error.type_name
            error = structs.replace(answer.error, message=f"rank {engine.rank}: {why}")
            self.refusals[engine.rank] = error
        if not self.waiting:
            self.complete(now)

    def lost(self, engine: EngineSession, now: float) -> None:
        """An engine has left the fleet."""
        if self.members.get(engine.engine_id) is not engine:
            return
        del self.members[engine.engine_id]
        self.lost_ranks.append(engine.rank)
        if self.waiting.pop(engine.engine_id, None) is not None and not self.waiting:
            self.complete(now)

    def ask(self, engines: Iterable[EngineSession], message: Message, now: float) -> None:
        """Make members of these engines, ask them, and wait for each; complete without any."""
        self.members = {engine.engine_id: engine for engine in engines}
        self.waiting = dict(self.members)
        for engine in self.members.values():
            engine.num_awaited += 1
            self.registry.context.send(engine, message)
        if not self.waiting:
            self.complete(now)

    def stop_waiting(self, engine: EngineSession, now: float) -> None:
        """It has answered, or its answer counts no more."""
        del self.waiting[engine.engine_id]
        engine.num_awaited -= 1
        engine.progress_at = now

    def stop_waiting_for_all(self, now: float) -> list[EngineSession]:
        """Returns the members that have not answered."""
        silent = list(self.waiting.values())
        for engine in silent:
            self.stop_waiting(engine, now)
        return silent

    def end(self) -> None:
        """With the first refusal, or the report of all engines. Map keys travel as strings."""
        self.outcome = next(iter(self.refusals.values()), None) or {
            "state": self.fleet.state.name,
            "weights_version": self.fleet.weights_version,
            "ranks": {str(rank): result for rank, result in sorted(self.results.items())},
            "lost_ranks": self.lost_ranks,
        }

    def end_unanswered(self, silent: list[EngineSession], ending: str) -> None:
        ranks = ", ".join(str(engine.rank) for engine in silent)
        error = EngineStateError(f"{self.name}: no answer in time from rank {ranks}; {ending}")
        self.outcome = WireError.of(error)


class Shutdown(Operation):
    """The end, in whatever state the engines are, and whatever they answer."""

    ending = "the coordinator ends all the same"

    def ask(self, engines: Iterable[EngineSession], message: Message, now: float) -> None:
        """Also those that have no work yet: they would look for the coordinator for ever."""
        super().ask(self.registry.engines.values(), message, now)


class StateChange(Operation):
    """PAUSE, UNPAUSE, SUSPEND, RESUME, STOP. The state changes when all have confirmed.

    If only some have, it does not, and the fleet is diverged: the command can be repeated, or its
    reverse given, and engines that are there already answer done.
    """

    message: Command

    def complete(self, now: float) -> None:
        fleet = self.fleet
        if self.refusals:
            fleet.is_diverged |= bool(self.results)
        else:
            before = fleet.state
            fleet.state, fleet.released = state_after(fleet, self.message)
            if self.message.header is not Headers.SUSPEND:
                # What engines that were suspended before have released, a repetition does not say.
                fleet.is_diverged = False
            logger.info("%s -> %s", before.name, fleet.state.name)
        self.end()

    def timed_out(self, now: float) -> None:
        self.fleet.is_diverged = True
        silent = self.stop_waiting_for_all(now)
        self.end_unanswered(silent, f"the fleet stays {self.fleet.state.name}")


class EpochChange(Operation):
    """SET_GENERATION_EPOCH, INCREMENT_STALENESS: the same weights under a later number.

    Unless every engine has refused, the number is taken: an engine that has not confirmed is
    removed, and gets it when it comes again.
    """

    def __init__(self, registry: Registry, message: Command, deadline_at: float) -> None:
        """Raises InvalidRequestError unless the number is above the current one."""
        super().__init__(registry, message, deadline_at)
        self._version = next_epoch(registry.fleet, message)

    def begin(self, now: float) -> None:
        own = COMMAND_TYPES[Headers.SET_GENERATION_EPOCH](
            command_id=self.command_id,
            arguments={"version": self._version},
            deadline_s=self.deadline_at - now,
        )
        self.ask(self.registry.ready_engines(), own, now)

    def complete(self, now: float) -> None:
        if not self.refusals or self.results or self.lost_ranks:
            self._take(now)
        self.end()

    def timed_out(self, now: float) -> None:
        silent = self.stop_waiting_for_all(now)
        self._take(now)
        self.end_unanswered(silent, f"it was removed; the version is {self._version}")

    def _take(self, now: float) -> None:
        old = self.fleet.weights or CommittedWeights(0, "", None)
        self.fleet.weights = replace(old, version=self._version)
        for engine in list(self.members.values()):
            if engine.rank in self.results:
                engine.weights_version = self._version
            else:
                reason = f"{self.name} was not confirmed"
                self.registry.remove(engine, reason, now, suspects=())
        self.registry.dispatcher.weights_changed(self.members.values())
