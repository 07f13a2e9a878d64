"""Killed processes of a fleet: engines restart, requests move or fail at once, and errors name
the reason."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from typing import Any

import pytest

from rollout import AsyncLLM, DynamicInferenceRequest, EngineStateError, Status
from rollout.errors import CoordinatorLostError
from tests.apis.fleets import CONFIG, DEADLINE_S, directory, params, until, weights
from tests.apis.leftovers import fleet_pids
from tests.apis.test_child_process import is_alive
from tests.tiny_models import Margins, prompt_of

pytestmark = pytest.mark.distributed
NUM_REQUESTS = 6
# Below what the client and its commands would wait without a word.
AT_ONCE_S = 30.0


async def served(llm: AsyncLLM) -> list[int]:
    """The weights version of each engine that is there."""
    ranks = (await llm.client.engine_stats()).by_rank
    return [stats.weights_version for stats in ranks.values()]


@pytest.mark.parametrize("size", [2, 1])
def test_killed_engine_restarts_and_no_token_changes(size: int) -> None:
    async def work() -> None:
        async with AsyncLLM(directory(), None, CONFIG, data_parallel_size=size) as llm:
            await llm.update_weights(weights(1).state_dict(), in_flight=True)
            jobs = [(prompt_of(9, seed=i), params(i, 250)) for i in range(NUM_REQUESTS)]
            undisturbed = await asyncio.gather(*(llm.generate(*job) for job in jobs))
            killed = fleet_pids()[1]
            tasks = await frozen_amid_work(llm, jobs, killed)
            os.kill(killed, signal.SIGKILL)
            requests = await asyncio.gather(*tasks)
            check_same(undisturbed, requests)

            async def is_back() -> bool:
                return await served(llm) == [1] * size

            await until(is_back, "the engine has the committed weights", every_s=0.2)
            assert killed not in fleet_pids()
            report = await llm.update_weights(weights(2).state_dict(), in_flight=True)
            assert report.version == 2
            assert await served(llm) == [2] * size

    asyncio.run(asyncio.wait_for(work(), DEADLINE_S))


async def frozen_amid_work(llm: AsyncLLM, jobs: list[Any], engine: int) -> list[Any]:
    """Submit jobs, and stop the engine's process before it has done all, whoever is quicker."""
    while True:
        tasks = [asyncio.ensure_future(llm.generate(*job)) for job in jobs]
        async for _ in llm.stream(*jobs[0]):
            break
        os.kill(engine, signal.SIGSTOP)
        if not all(task.done() for task in tasks):
            return tasks
        os.kill(engine, signal.SIGCONT)


def check_same(
    undisturbed: list[DynamicInferenceRequest], requests: list[DynamicInferenceRequest]
) -> None:
    margins = Margins()
    for request, reference in zip(requests, undisturbed, strict=True):
        margins.compare(weights(1), request, reference.generated_tokens)
    margins.check()


def test_max_engine_restarts_of_0_restarts_no_engine(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def work() -> None:
        options = {"data_parallel_size": 2, "max_engine_restarts": 0}
        async with AsyncLLM(directory(), None, CONFIG, **options) as llm:
            os.kill(fleet_pids()[1], signal.SIGKILL)
            await until(lambda: "after 0 restarts" in caplog.text, "its end is logged")
            assert (await llm.generate(prompt_of(9), params(1))).succeeded()

    asyncio.run(asyncio.wait_for(work(), DEADLINE_S))


def test_requests_fail_at_once_when_no_engine_is_left() -> None:
    named = r"no engine is left: engine 0 has used up its restarts \(SIGKILL\)"

    async def work() -> None:
        llm = AsyncLLM(directory(), None, CONFIG, max_engine_restarts=0)
        try:
            await llm.start()
            other = await AsyncLLM.connect(llm.address)
            coordinator, engine = fleet_pids()
            os.kill(engine, signal.SIGSTOP)  # it answers nothing any more
            batches = [[prompt_of(9)] * 2, [prompt_of(8)]]
            own, foreign = [
                asyncio.ensure_future(each.generate(batch, params(1, 400)))
                for each, batch in zip((llm, other), batches, strict=True)
            ]
            await asyncio.sleep(0)
            for each in (llm, other):  # refused by the coordinator, which has the requests by then
                with pytest.raises(EngineStateError):
                    await each.set_generation_epoch(9)
            os.kill(engine, signal.SIGKILL)
            with pytest.raises(CoordinatorLostError, match=named):
                await asyncio.wait_for(own, AT_ONCE_S)
            (request,) = await asyncio.wait_for(foreign, AT_ONCE_S)
            assert request.status is Status.FAILED
            with pytest.raises(CoordinatorLostError, match=named):
                await asyncio.wait_for(llm.generate(prompt_of(3)), AT_ONCE_S)
            await until(lambda: not is_alive(coordinator), "the coordinator ends")
            await other.shutdown()
        finally:
            await llm.shutdown()

    asyncio.run(asyncio.wait_for(work(), DEADLINE_S))


def test_killed_coordinator_fails_all_pending_calls_at_once() -> None:
    async def work() -> None:
        llm = AsyncLLM(directory(), None, CONFIG)
        await llm.start()
        try:
            coordinator, engine = fleet_pids()
            # The engine answers nothing any more, so all of these wait.
            os.kill(engine, signal.SIGSTOP)
            waiting = [
                asyncio.ensure_future(llm.generate([prompt_of(9)] * 2, params(1, 400))),
                asyncio.ensure_future(anext(llm.stream(prompt_of(9), params(1, 400)))),
                asyncio.ensure_future(llm.pause()),
                asyncio.ensure_future(llm.update_weights(weights(1).state_dict(), in_flight=True)),
            ]
            await asyncio.sleep(0)
            os.kill(coordinator, signal.SIGKILL)
            start = time.monotonic()
            done, _ = await asyncio.wait(waiting, timeout=AT_ONCE_S)
            print(f"\nall failed {time.monotonic() - start:.2f} s after the signal")
            assert len(done) == len(waiting)
            named = rf"process {coordinator} has ended \(SIGKILL\)"
            for task in waiting:
                with pytest.raises(CoordinatorLostError, match=named):
                    task.result()
            for method in (llm.unpause, llm.stats):
                with pytest.raises(CoordinatorLostError, match=named):
                    await asyncio.wait_for(method(), AT_ONCE_S)
            with pytest.raises(CoordinatorLostError, match=named):
                await asyncio.wait_for(llm.generate(prompt_of(3)), AT_ONCE_S)
            os.kill(engine, signal.SIGCONT)
            await until(lambda: not is_alive(engine), "the engine ends")
        finally:
            await llm.shutdown()

    asyncio.run(asyncio.wait_for(work(), DEADLINE_S))
