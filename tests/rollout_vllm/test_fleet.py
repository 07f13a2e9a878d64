"""A fleet of two engines over vLLM: updates in flight, and an engine that is killed."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import Any

import pytest

from rollout import AsyncLLM, EngineState, SamplingParams, WeightUpdateError
from tests.apis.leftovers import fleet_pids
from tests.contracts.vllm_engines import (
    BLOCK_SIZE,
    HAS_VLLM,
    directory_of,
    vllm_adapter,
    vllm_weights,
)

if not HAS_VLLM:
    pytest.skip("vLLM is not installed: make test-vllm", allow_module_level=True)

CONFIG: dict[str, Any] = {
    "engine": "vllm",
    "engine_options": {"num_gpu_blocks_override": 40, "enable_lora": True},
    "max_sequence_length": 256,
    "max_requests": 8,
    "block_size_tokens": BLOCK_SIZE,
    "dtype": "float32",
    "device": "cpu",
    "max_kv_staleness_versions": 1,
    "seed": 0,
}
PARAMS = SamplingParams(num_tokens_to_generate=120, return_log_probs=True, termination_id=-1)
NUM_REQUESTS = 12


@pytest.mark.timeout(1200)
def test_requests_of_a_killed_vllm_engine_go_on_in_another() -> None:
    """Each request ends once, under weights that came in flight, with true versions."""
    asyncio.run(generate_update_and_kill())


async def generate_update_and_kill() -> None:
    async with AsyncLLM(directory_of(), data_parallel_size=2, **CONFIG) as llm:
        tasks = [
            asyncio.create_task(llm.generate([5 + i] * 40, PARAMS)) for i in range(NUM_REQUESTS)
        ]
        for version, update in ((1, vllm_weights(1)), (2, vllm_adapter(0))):
            report = await llm.update_weights(update, in_flight=True)
            assert report.version == version
        _, victim, _ = fleet_pids()
        os.kill(victim, signal.SIGKILL)
        try:
            report = await llm.update_weights(vllm_weights(0), 3, in_flight=True)
        except WeightUpdateError:  # the engine died before its vote: all keep version 2
            report = await llm.update_weights(vllm_weights(0), 3, in_flight=True)
        assert report.version == 3
        requests = await asyncio.gather(*tasks)
        assert (await llm.stats()).state is EngineState.RUNNING
    assert [len(request.generated_tokens) for request in requests] == [120] * NUM_REQUESTS
    for request in requests:
        versions = request.policy_versions.tolist()
        assert versions == sorted(versions)
        ages = [v - kv for v, kv in zip(versions, request.context_kv_version_min, strict=True)]
        assert max(ages) <= CONFIG["max_kv_staleness_versions"]
