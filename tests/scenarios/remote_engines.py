"""Processes of test_two_hosts: `rollout engine` on a host, held at points that the test chooses."""

from __future__ import annotations

from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

from rollout.cli.main import main
from rollout.coordinator.agent.agent import EngineAgent
from rollout.weights.transports.buckets import Broadcasts
from rollout.weights.transports.registry import WeightFetcher

NUM_STEPS_BEFORE_THE_CUT = 20
# Where an engine receives a push: before it reads a directory, and once it is in the group of a
# collective and the bucket is in flight.
TAKES = {"directory": (WeightFetcher, "__call__"), "collective": (Broadcasts, "receive")}


def a_held_engine(
    pipe: Connection,
    address: str,
    model: str,
    keys: str,
    settings: Sequence[str],
    carrier: str = "directory",
) -> None:
    """Run `rollout engine`, and hold it in generation, and then in the next push by `carrier`.

    It sends "generates" after some steps with running requests, and "fetches" in the push, and
    waits for a message each time.
    """
    step, (kind, name) = EngineAgent.step, TAKES[carrier]
    take, said, passed, num_steps = getattr(kind, name), set[str](), set[str](), 0

    def hold(word: str) -> None:
        if word not in said:
            said.add(word)
            pipe.send(word)
            pipe.recv()
            passed.add(word)

    def counted_step(self: EngineAgent) -> Any:
        nonlocal num_steps
        num_steps += 1
        messages = step(self)
        if num_steps > NUM_STEPS_BEFORE_THE_CUT and self.status().num_running:
            hold("generates")
        return messages

    def held_take(*arguments: Any) -> Any:
        if "generates" in passed:
            hold("fetches")
        return take(*arguments)

    EngineAgent.step = counted_step  # type: ignore[method-assign]
    setattr(kind, name, held_take)
    an_engine(pipe, address, model, keys, settings)


def an_engine(
    pipe: Connection, address: str, model: str, keys: str, settings: Sequence[str]
) -> None:
    """Run `rollout engine`, and send its exit code."""
    pipe.send(main(["engine", "--join", address, "--keys", keys, f"model={model}", *settings]))
