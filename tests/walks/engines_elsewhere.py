"""`rollout engine` as a process of another host, and where a test holds it."""

from __future__ import annotations

from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

from rollout.cli.main import main
from rollout.coordinator.engine_side.agent import EngineAgent
from rollout.coordinator.protocol.weights_source import WeightsSource
from rollout.coordinator.weights.fetching import WeightFetcher

NUM_STEPS_BEFORE_THE_CUT = 20


def a_held_engine(
    pipe: Connection, address: str, model: str, keys: str, settings: Sequence[str]
) -> None:
    """`rollout engine`, which waits for a word after some steps, and when it fetches weights."""
    step, fetch, held = EngineAgent.step, WeightFetcher.__call__, set[str]()
    num_steps = 0

    def hold(where: str) -> None:
        if where not in held:
            held.add(where)
            pipe.send(where)
            pipe.recv()

    def counted_step(self: EngineAgent) -> Any:
        nonlocal num_steps
        num_steps += 1
        if num_steps > NUM_STEPS_BEFORE_THE_CUT:
            hold("generates")
        return step(self)

    def held_fetch(self: WeightFetcher, source: WeightsSource) -> Any:
        hold("fetches")
        return fetch(self, source)

    EngineAgent.step = counted_step  # type: ignore[method-assign]
    WeightFetcher.__call__ = held_fetch  # type: ignore[method-assign]
    an_engine(pipe, address, model, keys, settings)


def an_engine(
    pipe: Connection, address: str, model: str, keys: str, settings: Sequence[str]
) -> None:
    """Says its exit code."""
    pipe.send(main(["engine", "--join", address, "--keys", keys, f"model={model}", *settings]))
