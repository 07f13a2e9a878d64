"""A trainer whose event loop is blocked for longer than its lease."""

from __future__ import annotations

import asyncio
import time

import pytest

from rollout import EngineState, SamplingParams, Status
from rollout.coordinator.client.inference_client import InferenceClient
from rollout.coordinator.core.context import CoordinatorLimits
from tests.coordinator.live_fleet import BOUND_S, LiveFleet
from tests.tiny_models import prompt_of

pytestmark = pytest.mark.distributed
LIMITS = CoordinatorLimits(client_lease_s=1.0, heartbeat_s=0.2)
PARAMS = SamplingParams(num_tokens_to_generate=100)


def test_no_request_is_lost_when_a_client_blocks_between_suspend_and_resume() -> None:
    async def work(fleet: LiveFleet) -> None:
        async with InferenceClient(fleet.address) as client:
            futures = [client.add_request(prompt_of(5, seed=i), PARAMS) for i in range(9)]
            await client.pause_engines()
            await client.suspend_engines()
            assert not any(future.done() for future in futures)
            time.sleep(4 * LIMITS.client_lease_s)  # blocking on purpose
            await client.resume_engines()
            assert fleet.engine_states() == {EngineState.PAUSED}
            await client.unpause_engines()
            records = await asyncio.wait_for(asyncio.gather(*futures), BOUND_S)
            assert [record.request_id for record in records] == list(range(9))
            assert {record.current.status for record in records} == {Status.COMPLETED}
        assert fleet.coordinator.counters.num_clients_lost == 0
        assert fleet.coordinator.counters.num_abandoned == 0

    with LiveFleet(1, LIMITS) as fleet:
        asyncio.run(work(fleet))
