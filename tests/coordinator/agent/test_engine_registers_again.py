"""An engine that is removed while its memory is released registers again and gets the fleet's state
and weights."""

from __future__ import annotations

from typing import Any

import pytest

from rollout import EngineState
from rollout.coordinator.agent.agent import EngineAgent
from rollout.coordinator.protocol.messages import Credit, Heartbeat, RegisterAck
from rollout.weights.source import WeightsSource
from tests.coordinator.agent.test_engine_agent import staged
from tests.coordinator.scripted_router import register_ack
from tests.tiny_models import tiny_engine, tiny_model

SOURCE = WeightsSource(kind="test", address="here", manifest=b"", checksum="")


def acknowledged(state: str) -> RegisterAck:
    """The fleet is in `state`, and serves version 1."""
    return register_ack(state=state, weights_version=1, weights=SOURCE)


@pytest.mark.parametrize("discard", [False, True])
@pytest.mark.parametrize("state", ["RUNNING", "PAUSED", "SUSPENDED"])
def test_newer_weights_are_taken_by_an_engine_that_had_released_its_own(
    state: str, discard: bool
) -> None:
    model: Any = tiny_model("qwen3", seed=20)
    engine = tiny_engine(model, num_blocks=16)
    agent = EngineAgent(
        engine,
        engine_id=bytes(16),
        block_size_tokens=8,
        max_requests=4,
        settings={},
        fetch=lambda _: dict(model.named_parameters()),
    )
    engine.pause()
    engine.suspend(release=("kv_cache", "weights"), discard_weights=discard)
    assert not agent.handle(acknowledged(state))
    beat, credit = staged(agent)
    assert isinstance(beat, Heartbeat)
    assert credit == Credit(num_granted=8)
    assert (engine.state, engine.weights_version) == (EngineState[state], 1)
    if engine.state is EngineState.SUSPENDED:
        engine.resume()
    engine.unpause()
