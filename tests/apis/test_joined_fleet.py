"""AsyncLLM.connect and fleets whose coordinator or engines other programs start."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from rollout import AsyncLLM, ConfigError, EngineState, WeightUpdateError
from rollout.apis.engine_process import run_engine
from tests.apis.fleets import CONFIG, DEADLINE_S, directory, params, until, weights
from tests.apis.history_oracle import HistoryOracle
from tests.apis.leftovers import fleet_pids
from tests.apis.shells import said_first, shell, shell_engine
from tests.tiny_models import prompt_of

pytestmark = pytest.mark.distributed
WAIT_S = 120


def test_connect_serves_several_clients_of_a_shells_fleet() -> None:
    async def work(address: str, engine: subprocess.Popen[str]) -> None:
        first, second = [await AsyncLLM.connect(address) for _ in range(2)]
        oracle = HistoryOracle(weights)
        oracle.check(await first.generate(prompt_of(9), params(1)))
        await first.pause()
        await first.unpause()
        with pytest.raises(WeightUpdateError, match=r"'model\.norm\.weight' holds NaN"):
            await first.update_weights(with_nan(), in_flight=True)
        await first.update_weights(weights(1).state_dict(), in_flight=True)
        await first.shutdown()
        assert first.state is EngineState.STOPPED
        assert engine.poll() is None
        request = await second.generate(prompt_of(9), params(1))
        oracle.check(request)
        assert set(request.policy_versions.tolist()) == {1}
        await second.shutdown(end_fleet=True)

    with shell("coordinator", "data_parallel_size=1") as coordinator:
        address = said_first(coordinator)
        with shell_engine(address) as engine:
            asyncio.run(asyncio.wait_for(work(address, engine), DEADLINE_S))
            assert engine.wait(WAIT_S) == 0
            assert coordinator.wait(WAIT_S) == 0


def with_nan() -> dict[str, torch.Tensor]:
    state: dict[str, torch.Tensor] = weights(1).state_dict()
    name = "model.norm.weight"
    return {**state, name: torch.full_like(state[name], torch.nan)}


def test_connected_update_weights_follows_reject_non_finite_weights_of_engines() -> None:
    async def work() -> None:
        async with AsyncLLM(directory(), None, CONFIG, reject_non_finite_weights=False) as llm:
            other = await AsyncLLM.connect(llm.address)
            report = await other.update_weights(with_nan(), in_flight=True)
            assert report.version == 1
            await other.shutdown()

    asyncio.run(asyncio.wait_for(work(), DEADLINE_S))


def test_async_llm_with_spawn_0_waits_for_joined_engines() -> None:
    async def work() -> None:
        async with AsyncLLM(directory(), None, CONFIG, data_parallel_size=2, spawn=0) as llm:
            assert len(fleet_pids()) == 1
            waiting = asyncio.ensure_future(llm.generate(prompt_of(9), params(1)))
            with shell_engine(llm.address) as engine:
                HistoryOracle(weights).check(await waiting)
                await llm.shutdown()
                await until(lambda: engine.poll() == 0, "the shutdown ends it")

    asyncio.run(asyncio.wait_for(work(), DEADLINE_S))


def test_joining_engine_with_other_settings_is_refused_by_name(
    tmp_path: Path,
) -> None:
    def directory_with(**changes: Any) -> Path:
        """The tests' model, with a config that says something else of the same weights."""
        path = tmp_path / "-".join(changes)
        shutil.copytree(directory(), path)
        config = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps(config | changes))
        return path

    theta = {"rope_theta": 5e5, "rope_type": "default"}
    others = {
        "max_sequence_length=256, the fleet 512": (directory(), {"max_sequence_length": 256}),
        "rms_norm_eps=0.01, the fleet": (directory_with(rms_norm_eps=0.01), {}),
        "rope.theta=500000, the fleet": (directory_with(rope_parameters=theta), {}),
        r"end_token_ids=\[7\], the fleet \[\]": (directory_with(eos_token_id=7), {}),
    }

    async def work() -> None:
        async with AsyncLLM(directory(), None, CONFIG, data_parallel_size=2, spawn=1) as llm:
            for message, (path, changes) in others.items():
                config = CONFIG.replace(**changes)
                with pytest.raises(ConfigError, match=message):
                    await asyncio.to_thread(run_engine, llm.address, path, None, config)
            HistoryOracle(weights).check(await llm.generate(prompt_of(9), params(1)))

    asyncio.run(asyncio.wait_for(work(), DEADLINE_S))


def test_connect_address_and_spawn_are_checked() -> None:
    with pytest.raises(ConfigError, match="tcp://"):
        asyncio.run(AsyncLLM.connect("nowhere"))
    for spawn in (3, -1):
        with pytest.raises(ConfigError, match=rf"spawn={spawn} must be in \[0, 2\]"):
            AsyncLLM(directory(), None, CONFIG, data_parallel_size=2, spawn=spawn)
