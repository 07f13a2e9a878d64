"""A fleet whose engines have several ranks, one process each."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from rollout import LLM, AsyncLLM
from tests.apis.fleets import CONFIG, DEADLINE_S, directory, params, until, weights
from tests.apis.leftovers import children_of, fleet_pids
from tests.apis.test_fleet_losses import check_same, frozen_amid_work, served
from tests.tiny_models import prompt_of

pytestmark = pytest.mark.distributed
NUM_REQUESTS = 6


def test_killed_rank_moves_requests_and_its_engine_restarts() -> None:
    jobs = [(prompt_of(9, seed=i), params(i, 250)) for i in range(NUM_REQUESTS)]
    with LLM(directory(), None, CONFIG) as one:
        one.update_weights(weights(1), in_flight=True)
        checksum = one.weights_checksum()
        undisturbed = [one.generate(*job) for job in jobs]

    async def work() -> None:
        sizes = {"tensor_parallel_size": 2, "data_parallel_size": 2}
        async with AsyncLLM(directory(), None, CONFIG, **sizes) as llm:
            await llm.update_weights(weights(1).state_dict(), in_flight=True)
            assert await llm.weights_checksum() == checksum
            ranks = (await llm.stats()).ranks
            assert [rank.label for rank in ranks] == ["0.0", "0.1", "1.0", "1.1"]
            assert all(rank.weights_bytes and rank.cpu_seconds for rank in ranks)
            engine = fleet_pids()[1]
            (rank,) = children_of(engine)
            tasks = await frozen_amid_work(llm, jobs, rank)
            os.kill(rank, signal.SIGKILL)
            check_same(undisturbed, await asyncio.gather(*tasks))

            async def is_back() -> bool:
                return await served(llm) == [1, 1]

            await until(is_back, "the engine has the committed weights", every_s=0.2)
            assert engine not in fleet_pids()
            assert [len(children_of(pid)) for pid in fleet_pids()[1:]] == [1, 1]
            report = await llm.update_weights(weights(2).state_dict(), in_flight=True)
            assert (report.version, await served(llm)) == (2, [2, 2])

    asyncio.run(asyncio.wait_for(work(), DEADLINE_S))
