"""AsyncLLM with a launcher of the caller."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from rollout import AsyncLLM, ConfigError
from rollout.launch.launcher import EngineJob, LaunchedEngine
from rollout.launch.local import LocalLauncher
from tests.apis.fleets import CONFIG, DEADLINE_S, directory, params
from tests.apis.leftovers import fleet_pids
from tests.tiny_models import prompt_of

pytestmark = pytest.mark.distributed


class LoopbackLauncher(LocalLauncher):
    """Its engines dial this machine by address, as those of other hosts do."""

    host = "127.0.0.1"  # type: ignore[assignment]

    def __init__(self) -> None:
        self.num_closed = 0
        self.jobs: list[EngineJob] = []

    def num_threads(self, num_engines: int) -> int:
        return 3

    def launch(self, job: EngineJob, num_engines: int) -> Sequence[LaunchedEngine]:
        self.jobs.append(job)
        return super().launch(job, num_engines)

    def close(self) -> None:
        self.num_closed += 1


class UnseenLauncher(LoopbackLauncher):
    """Its engines come by themselves: nobody here can watch them."""

    def launch(self, job: EngineJob, num_engines: int) -> list[LaunchedEngine]:
        self.unseen = super().launch(job, num_engines)
        return []


class RefusingLauncher(LoopbackLauncher):
    def launch(self, job: EngineJob, num_engines: int) -> list[LaunchedEngine]:
        self.jobs.append(job)
        raise ConfigError("no room")


def test_launcher_engines_connect_to_its_host_with_the_fleets_keys() -> None:
    launcher = LoopbackLauncher()

    async def work() -> None:
        config = CONFIG.replace(num_threads=None)
        async with AsyncLLM(directory(), None, config, launcher=launcher) as llm:
            assert llm.address.startswith("tcp://127.0.0.1:")
            assert (await llm.generate(prompt_of(9), params(1))).succeeded()
            assert not launcher.num_closed

    asyncio.run(asyncio.wait_for(work(), DEADLINE_S))
    (job,) = launcher.jobs
    assert job.arguments["inference_config"].num_threads == 3
    assert job.arguments["curve"] is not None
    assert job.num_gpus == 0
    assert launcher.num_closed == 1


@pytest.mark.parametrize(("given", "ranks", "each"), [(None, 1, 3), (None, 2, 1), (2, 2, 2)])
def test_engine_ranks_share_num_threads(given: int, ranks: int, each: int) -> None:
    config = CONFIG.replace(num_threads=given, tensor_parallel_size=ranks)
    launcher = RefusingLauncher()
    with pytest.raises(ConfigError, match="no room"):
        AsyncLLM(directory(), None, config, launcher=launcher)
    assert launcher.jobs[0].arguments["inference_config"].num_threads == each


def test_requests_wait_for_engines_that_join_by_themselves() -> None:
    launcher = UnseenLauncher()

    async def work() -> None:
        async with AsyncLLM(directory(), None, CONFIG, launcher=launcher) as llm:
            assert (await llm.generate(prompt_of(9), params(1))).succeeded()
            (engine,) = launcher.unseen
            engine.end_restarts()
            engine.kill()
            engine.join(DEADLINE_S)
            # Nobody tells the fleet that none is left, and another may come.
            launcher.launch(launcher.jobs[0], 1)
            assert (await llm.generate(prompt_of(9), params(1))).succeeded()

    asyncio.run(asyncio.wait_for(work(), DEADLINE_S))


def test_refused_launch_ends_the_coordinator() -> None:
    launcher, others = RefusingLauncher(), fleet_pids()
    with pytest.raises(ConfigError, match="no room"):
        AsyncLLM(directory(), None, CONFIG, launcher=launcher)
    assert {*fleet_pids()} <= {*others}  # those of an earlier test may end meanwhile
    assert launcher.num_closed == 1
