"""Weights reach engine processes by each transport, also processes that come late."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from rollout import (
    AsyncLLM,
    ConfigError,
    DynamicInferenceRequest,
    SamplingParams,
    WeightUpdateError,
)
from rollout.apis.weight_push import WeightPush
from rollout.control.reports import WeightUpdateReport
from rollout.coordinator.core.context import CoordinatorLimits
from rollout.weights.source import WeightsSource
from rollout.weights.transports.base import WeightTransport
from rollout.weights.transports.collective import CudaIpcTransport
from rollout.weights.transports.registry import WeightFetcher
from rollout.weights.transports.shared import SharedTransport
from tests.apis.fleets import CONFIG, DEADLINE_S, directory, until, weights
from tests.apis.leftovers import fleet_pids
from tests.coordinator.live_fleet import BOUND_S, LiveEngine, LiveFleet
from tests.tiny_models import prompt_of, tiny_engine, tiny_model

KINDS: dict[str, Callable[[Path], str | WeightTransport]] = {
    "shared": lambda path: "shared",
    "directory": lambda path: f"directory:{path}",
    "collective": lambda path: "collective",
    "cuda_ipc": lambda path: CudaIpcTransport(place="host"),
    "delta+directory": lambda path: f"delta+directory:{path}",
    "delta+collective": lambda path: "delta+collective:127.0.0.1",
}


def checksum(version: int) -> str:
    return tiny_engine(weights(version)).weights_checksum()


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "shared"])
def test_restarted_engine_fetches_the_committed_weights(kind: str, tmp_path: Path) -> None:
    async def work() -> None:
        transport = KINDS[kind](tmp_path)
        async with AsyncLLM(
            directory(), None, CONFIG, data_parallel_size=2, weight_transport=transport
        ) as llm:
            await llm.update_weights(weights(1), in_flight=True)
            assert await llm.weights_checksum() == checksum(1)
            os.kill(fleet_pids()[1], signal.SIGKILL)

            async def is_gone() -> bool:
                return len(await served(llm)) == 1

            async def is_back() -> bool:
                await llm.update_weights(weights(2), in_flight=True)
                return await served(llm) == [llm.weights_version] * 2

            await until(is_gone, "the engine is lost", every_s=0.05)
            await until(is_back, "the engine has the committed weights", every_s=0.5)
            incomplete = dict(weights(2).named_parameters())
            incomplete.popitem()
            with pytest.raises(WeightUpdateError, match=r"rank \d: the update lacks 1"):
                await llm.update_weights(incomplete, in_flight=True)
            await llm.update_weights(weights(3), in_flight=True)
            assert await llm.weights_checksum() == checksum(3)
        assert not list(tmp_path.iterdir()), "nothing is left behind"

    asyncio.run(asyncio.wait_for(work(), DEADLINE_S))


@pytest.mark.distributed
def test_generate_after_a_lost_collective_push_asks_for_another() -> None:
    params = SamplingParams(num_tokens_to_generate=4, seed=1)

    async def work() -> None:
        options = {"limits": CoordinatorLimits(push_wait_s=1.0)}
        async with AsyncLLM(
            directory(), None, CONFIG, weight_transport="collective", coordinator_options=options
        ) as llm:
            await llm.update_weights(weights(1), in_flight=True)
            os.kill(fleet_pids()[1], signal.SIGKILL)
            request = await llm.generate(prompt_of(9), params)
            assert request.finish_reason == "error"
            assert "Push the weights and submit again" in str(request.last_error)
            await llm.update_weights(weights(1), in_flight=True)
            request = await llm.generate(prompt_of(9), params)
            assert request.succeeded()
            assert set(request.policy_versions.tolist()) == {2}

    asyncio.run(asyncio.wait_for(work(), DEADLINE_S))


async def served(llm: AsyncLLM) -> list[int]:
    """The weights version of each engine that is there."""
    ranks = (await llm.client.engine_stats()).by_rank
    return [stats.weights_version for stats in ranks.values()]


@pytest.mark.drawn(2)
@pytest.mark.parametrize("kind", KINDS)
def test_update_weights_by_every_transport_reaches_a_late_engine(kind: str, tmp_path: Path) -> None:
    async def work(fleet: LiveFleet) -> None:
        async with AsyncLLM.joined(fleet.address, weight_transport=KINDS[kind](tmp_path)) as llm:
            await llm.update_weights(tiny(21), in_flight=True)
            fleet.engines.append(LiveEngine(fleet.address, 2))
            fleet.engines[2].link.wait_registered(BOUND_S)
            incomplete = dict(tiny(22).named_parameters())
            incomplete.popitem()
            with pytest.raises(WeightUpdateError, match=r"rank \d: the update lacks 1"):
                await llm.update_weights(incomplete, in_flight=True)
            await llm.update_weights(tiny(22), in_flight=True)

            async def all_serve() -> bool:
                return await served(llm) == [2, 2, 2]

            await until(all_serve, "the late engine serves the weights, too")
            assert await llm.weights_checksum() == tiny_engine(tiny(22)).weights_checksum()
            request = await llm.generate(prompt_of(5), SamplingParams(num_tokens_to_generate=3))
            assert isinstance(request, DynamicInferenceRequest)
            assert request.policy_versions.tolist() == [2, 2, 2]
        assert not list(tmp_path.iterdir()), "nothing is left behind"

    with LiveFleet() as fleet:
        asyncio.run(asyncio.wait_for(work(fleet), DEADLINE_S))


def tiny(seed: int) -> Any:
    return tiny_model("qwen3", seed=seed)


@pytest.mark.parametrize(
    "name", ["pigeon", "shared:here", "delta+shared", "directory", "directory:/dev/null/x"]
)
def test_unknown_weight_transport_is_refused_before_any_process_starts(name: str) -> None:
    with pytest.raises(ConfigError, match=r"weight|directory"):
        AsyncLLM(directory(), None, CONFIG, weight_transport=name)


class Unsent(SharedTransport):
    """A transport whose engines have committed before it fails to send."""

    def send(self, source: WeightsSource) -> None:
        raise WeightUpdateError("no route to the engines")


def test_update_weights_raises_if_sending_fails_after_the_vote() -> None:
    """The version is committed, and the transport's source with it."""

    async def nothing() -> None:
        pass

    async def committed(source: WeightsSource) -> WeightUpdateReport:
        return WeightUpdateReport(
            version=1, seconds=0.0, stall_seconds=0.0, num_bytes=4, checksum=""
        )

    async def work() -> None:
        transport = Unsent()
        push = WeightPush(transport, True, lambda: "127.0.0.1")
        with pytest.raises(WeightUpdateError, match="no route to the engines"):
            await push.push({"w": torch.zeros(1)}, nothing, committed)
        assert transport.committed is not None
        await push.close()

    asyncio.run(work())


def test_own_engine_votes_no_on_a_push_by_vllm() -> None:
    source = WeightsSource(kind="vllm:gloo", address="127.0.0.1:1 1-a ", manifest=b"", checksum="")
    with pytest.raises(WeightUpdateError, match="'vllm:gloo' cannot be fetched by this engine"):
        WeightFetcher()(source)
