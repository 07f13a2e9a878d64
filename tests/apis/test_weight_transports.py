"""Weights reach engine processes by each transport, also those that come late."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from rollout import AsyncLLM, ConfigError, WeightUpdateError
from tests.apis.fleets import CONFIG, DEADLINE_S, directory, until, weights
from tests.apis.leftovers import fleet_pids
from tests.tiny_models import tiny_engine

pytestmark = pytest.mark.distributed


def checksum(version: int) -> str:
    return tiny_engine(weights(version)).weights_checksum()


def test_engines_read_a_directory_and_one_that_comes_back_catches_up(tmp_path: Path) -> None:
    async def work() -> None:
        async with AsyncLLM(
            directory(),
            None,
            CONFIG,
            data_parallel_size=2,
            weight_transport=f"directory:{tmp_path}",
        ) as llm:
            await llm.update_weights(weights(1), in_flight=True)
            assert await llm.weights_checksum() == checksum(1)
            os.kill(fleet_pids()[1], signal.SIGKILL)

            async def is_back() -> bool:
                ranks = (await llm.client.engine_stats())["ranks"]
                return [stats["weights_version"] for stats in ranks.values()] == [1, 1]

            await until(is_back, "the engine has the committed weights", every_s=0.2)
            incomplete = dict(weights(2).named_parameters())
            incomplete.popitem()
            with pytest.raises(WeightUpdateError, match=r"rank \d: the update lacks 1"):
                await llm.update_weights(incomplete, in_flight=True)
            await llm.update_weights(weights(3), in_flight=True)
            assert await llm.weights_checksum() == checksum(3)
            assert len(list(tmp_path.iterdir())) == 1
        assert not list(tmp_path.iterdir()), "nothing is left behind"

    asyncio.run(asyncio.wait_for(work(), DEADLINE_S))


@pytest.mark.parametrize("name", ["pigeon", "shared:here", "directory", "directory:/dev/null/x"])
def test_a_transport_that_cannot_be_is_refused_before_anything_starts(name: str) -> None:
    with pytest.raises(ConfigError, match=r"weight|directory"):
        AsyncLLM(directory(), None, CONFIG, weight_transport=name)
