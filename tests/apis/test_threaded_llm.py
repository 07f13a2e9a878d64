"""ThreadedLLM: failures, ends and cancelled calls of its thread. test_every_llm.py has the rest."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Iterator
from typing import Any

import pytest

from rollout import (
    LLM,
    EngineStateError,
    InferenceConfig,
    SamplingParams,
)
from tests.apis.fleets import directory
from tests.tiny_models import BLOCK_SIZE, prompt_of
from trainer_hooks import ThreadedLLM

CONFIG = InferenceConfig(
    block_size_tokens=BLOCK_SIZE, max_sequence_length=512, buffer_size_gb=0.02, num_threads=1
)
PARAMS = SamplingParams(num_tokens_to_generate=20, seed=3)
WAIT_S = 100.0
ENDLESS = SamplingParams(num_tokens_to_generate=480)


@pytest.fixture
def llm() -> Iterator[LLM]:
    with LLM(directory(), inference_config=CONFIG) as llm:
        yield llm


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(work, WAIT_S))


def test_generate_of_many_tasks_gives_the_tokens_of_llm_generate(llm: LLM) -> None:
    prompts = [prompt_of(5 + i) for i in range(4)]
    expected = [llm.generate(prompt, PARAMS, n=2) for prompt in prompts]

    async def work() -> None:
        async with ThreadedLLM(llm) as threaded:
            works = [threaded.generate(prompt, PARAMS, 2) for prompt in prompts]
            for given, wanted in zip(await asyncio.gather(*works), expected, strict=True):
                tokens = [request.generated_tokens for request in given]
                assert tokens == [request.generated_tokens for request in wanted]
        with pytest.raises(EngineStateError, match="has ended"):
            await threaded.generate(prompts[0], PARAMS)

    run(work())
    assert llm.generate(prompts[0], PARAMS).succeeded(), "the LLM stays"


def paused_from_within(llm: LLM, num_steps: int) -> threading.Event:
    """Pause the engine after so many steps from now on. Set when it is paused."""
    step, paused, num_left = llm.engine.step, threading.Event(), num_steps

    def step_or_pause() -> Any:
        nonlocal num_left
        num_left -= 1
        records = step()
        if num_left == 0:
            llm.engine.pause()
            paused.set()
        return records

    llm.engine.step = step_or_pause  # type: ignore[method-assign]
    return paused


def test_cancelled_generate_aborts_and_a_pause_only_delays(llm: LLM) -> None:
    async def work() -> None:
        async with ThreadedLLM(llm) as threaded:
            paused = paused_from_within(llm, num_steps=5)
            tasks = [asyncio.ensure_future(threaded.generate([1], ENDLESS)) for _ in range(3)]
            assert await asyncio.to_thread(paused.wait, WAIT_S)
            tasks[0].cancel()
            late = asyncio.ensure_future(threaded.generate([2], PARAMS))
            await asyncio.sleep(0.1)
            assert not late.done()
            llm.suspend("offload")
            llm.resume()
            llm.unpause()
            assert len((await late).generated_tokens) == 20
            assert len((await tasks[1]).generated_tokens) == 480
            last = asyncio.ensure_future(threaded.generate([1], ENDLESS))
            while not llm.engine.has_unfinished_requests():
                await asyncio.sleep(0)
        for task in (tasks[0], last):
            with pytest.raises((asyncio.CancelledError, EngineStateError)):
                await task
        assert not llm.engine.has_unfinished_requests()

    run(work())


@pytest.mark.parametrize("before", [[], ["pause"], ["pause", "suspend"]])
def test_shutdown_of_the_llm_ends_generate_with_an_error(llm: LLM, before: list[str]) -> None:
    async def work() -> None:
        async with ThreadedLLM(llm) as threaded:
            for command in before:
                getattr(llm, command)()
            task = asyncio.ensure_future(threaded.generate([1], ENDLESS))
            while not llm.engine.has_unfinished_requests():
                await asyncio.sleep(0.001)
            llm.shutdown()
            with pytest.raises(EngineStateError, match="was shut down"):
                await task

    run(work())


def test_group_submitted_to_the_llm_before_is_left_to_its_collect(llm: LLM) -> None:
    async def work() -> None:
        (group_id,) = llm.submit([1], SamplingParams(num_tokens_to_generate=2))
        async with ThreadedLLM(llm) as threaded:
            request = await threaded.generate([1], PARAMS)
            assert len(request.generated_tokens) == 20
        (group,) = llm.collect()
        assert (group.group_id, len(group.requests[0].generated_tokens)) == (group_id, 2)

    run(work())


class FailingEngine:
    """Makes the first `num_failures` steps of an LLM's engine raise."""

    def __init__(self, llm: LLM, num_failures: int) -> None:
        self._step, self.num_left = llm.engine.step, num_failures
        llm.engine.step = self.step  # type: ignore[method-assign]

    def step(self) -> Any:
        if self.num_left:
            self.num_left -= 1
            raise RuntimeError("the device is gone")
        return self._step()


def test_step_that_fails_twice_only_delays_generate(llm: LLM) -> None:
    async def work() -> None:
        async with ThreadedLLM(llm) as threaded:
            failing = FailingEngine(llm, num_failures=2)
            request = await threaded.generate([1], PARAMS)
            assert len(request.generated_tokens) == 20
            assert failing.num_left == 0

    run(work())


def test_lost_returns_the_error_of_three_failed_steps(llm: LLM) -> None:
    async def work() -> None:
        async with ThreadedLLM(llm) as threaded:
            FailingEngine(llm, num_failures=3)
            with pytest.raises(RuntimeError, match="the device is gone"):
                await threaded.generate([1], PARAMS)
            error = await threaded.lost()
            assert "the device is gone" in str(error)
            with pytest.raises(EngineStateError, match="has ended"):
                await threaded.generate([1])

    run(work())


def test_llm_generate_is_refused_while_a_threaded_llm_steps_it(llm: LLM) -> None:
    async def work() -> None:
        async with ThreadedLLM(llm) as threaded:
            await threaded.generate([1], PARAMS)
            with pytest.raises(EngineStateError, match="another thread"):
                llm.generate([1], PARAMS)

    run(work())
    assert llm.generate([1], PARAMS).succeeded()


class SlowToEnd(ThreadedLLM):
    """Its thread lives on for a while after all that it had to do."""

    def __init__(self, llm: LLM) -> None:
        self.is_done, self.may_end = threading.Event(), threading.Event()
        super().__init__(llm)

    def _run(self) -> None:
        super()._run()
        self.is_done.set()
        self.may_end.wait()


def test_generate_while_aclose_ends_the_thread_is_refused(llm: LLM) -> None:
    async def work() -> None:
        threaded = SlowToEnd(llm)
        closing = asyncio.ensure_future(threaded.aclose())
        await asyncio.to_thread(threaded.is_done.wait)
        try:
            with pytest.raises(EngineStateError, match="has ended"):
                await threaded.generate([1])
        finally:
            threaded.may_end.set()
            await closing

    run(work())
