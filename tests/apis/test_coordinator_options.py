"""Settings that AsyncLLM passes to its coordinator: a registered routing policy, the schedule's
output, prefix routing."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from rollout import AsyncLLM, ConfigError, InferenceConfig, SamplingParams
from rollout.coordinator.routing import policies
from rollout.coordinator.routing.policies import RoundRobinPolicy
from tests.apis.test_every_llm import directory
from tests.tiny_models import prompt_of

PARAMS = SamplingParams(num_tokens_to_generate=2)


class LastFirst(RoundRobinPolicy):
    """The engine of the highest rank, always."""

    def choose(self, *args: Any, **kwargs: Any) -> int:
        return 1


def routed(path: Path, policy: str, **config: Any) -> dict[str, Any]:
    """Six requests, one after another; the schedule that the coordinator wrote."""
    own = InferenceConfig(
        block_size_tokens=8,
        max_sequence_length=64,
        buffer_size_gb=0.01,
        num_threads=1,
        prefix_caching_coordinator_policy=policy,
        **config,
    )
    options = {"schedule_output_path": str(path), "deterministic_mode": True}

    async def work() -> None:
        async with AsyncLLM(
            directory(),
            inference_config=own,
            data_parallel_size=2,
            coordinator_options=options,
        ) as llm:
            while len((await llm.client.engine_stats()).by_rank) < 2:
                await asyncio.sleep(0.01)  # requests do not wait for the second engine
            for seed in (1, 1, 2, 2, 3, 3):
                await llm.generate(prompt_of(33, seed), PARAMS)

    asyncio.run(work())
    return json.loads(path.read_text())


@pytest.mark.slow
def test_registered_routing_policy_works_in_the_coordinators_process(
    tmp_path: Path,
) -> None:
    policies.register_policy("test_last_first")(LastFirst)
    schedule = routed(tmp_path / "schedule.json", "test_last_first")
    assert (schedule["data_parallel_size"], schedule["num_requests"]) == (2, 6)
    assert schedule["policy"].endswith("LastFirst")
    assert [record["rank_index"] for record in schedule["records"]] == [1] * 6


@pytest.mark.slow
def test_prefix_policy_routes_equal_prompts_to_one_engine(tmp_path: Path) -> None:
    path = tmp_path / "schedule.json"
    schedule = routed(path, "longest_prefix", enable_prefix_caching=True)
    ranks = [record["rank_index"] for record in schedule["records"]]
    assert schedule["policy"] == "longest_prefix"
    assert [record["num_hashes"] for record in schedule["records"]] == [4] * 6
    assert ranks[0::2] == ranks[1::2]


def test_unknown_routing_policy_is_refused_before_any_process_starts() -> None:
    config = InferenceConfig(prefix_caching_coordinator_policy="longest")
    with pytest.raises(ConfigError, match="longest_prefix"):
        AsyncLLM(directory(), inference_config=config)
