"""An LLM in this process, awaited."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from rollout import (
    LLM,
    EngineState,
    EngineStateError,
    InferenceConfig,
    InvalidRequestError,
    SamplingParams,
)
from tests.apis.fleets import directory
from tests.tiny_models import BLOCK_SIZE, prompt_of
from trainer_hooks import ThreadedLLM, WeightSync

CONFIG = InferenceConfig(
    block_size_tokens=BLOCK_SIZE, max_sequence_length=512, buffer_size_gb=0.02, num_threads=1
)
PARAMS = SamplingParams(num_tokens_to_generate=20, seed=3)
WAIT_S = 100.0
ENDLESS = SamplingParams(num_tokens_to_generate=480)


def test_many_are_awaited_together_and_are_what_the_llm_generates() -> None:
    prompts = [prompt_of(5 + i) for i in range(4)]
    with LLM(directory(), inference_config=CONFIG) as llm:
        expected = [llm.generate(prompt, PARAMS, n=2) for prompt in prompts]

        async def work() -> None:
            async with ThreadedLLM(llm) as threaded:
                works = [threaded.generate(prompt, PARAMS, 2) for prompt in prompts]
                for given, wanted in zip(await asyncio.gather(*works), expected, strict=True):
                    tokens = [request.generated_tokens for request in given]
                    assert tokens == [request.generated_tokens for request in wanted]
                single = await threaded.generate(prompts[0], PARAMS)
                assert single.generated_tokens == expected[0][0].generated_tokens
                with pytest.raises(InvalidRequestError):
                    await threaded.generate([[]], PARAMS)
            with pytest.raises(EngineStateError, match="has ended"):
                await threaded.generate(prompts[0], PARAMS)

        asyncio.run(work())
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


def test_cancelling_aborts_and_a_pause_only_delays() -> None:
    async def work(llm: LLM) -> None:
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

    with LLM(directory(), inference_config=CONFIG) as llm:
        asyncio.run(asyncio.wait_for(work(llm), WAIT_S))


@pytest.mark.parametrize("before", [[], ["pause"], ["pause", "suspend"]])
def test_a_shutdown_of_the_llm_is_told_to_those_who_wait(before: list[str]) -> None:
    async def work(llm: LLM) -> None:
        async with ThreadedLLM(llm) as threaded:
            for command in before:
                getattr(llm, command)()
            task = asyncio.ensure_future(threaded.generate([1], ENDLESS))
            while not llm.engine.has_unfinished_requests():
                await asyncio.sleep(0.001)
            llm.shutdown()
            with pytest.raises(EngineStateError, match="was shut down"):
                await asyncio.wait_for(task, WAIT_S)

    with LLM(directory(), inference_config=CONFIG) as llm:
        asyncio.run(work(llm))


def test_a_group_that_the_llm_had_before_is_left_to_its_collect() -> None:
    async def work(llm: LLM) -> None:
        (group_id,) = llm.submit([1], SamplingParams(num_tokens_to_generate=2))
        async with ThreadedLLM(llm) as threaded:
            request = await asyncio.wait_for(threaded.generate([1], PARAMS), WAIT_S)
            assert len(request.generated_tokens) == 20
        (group,) = llm.collect()
        assert (group.group_id, len(group.requests[0].generated_tokens)) == (group_id, 2)

    with LLM(directory(), inference_config=CONFIG) as llm:
        asyncio.run(work(llm))


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


def test_a_step_that_fails_twice_only_delays_generate() -> None:
    async def work(llm: LLM) -> None:
        async with ThreadedLLM(llm) as threaded:
            failing = FailingEngine(llm, num_failures=2)
            request = await asyncio.wait_for(threaded.generate([1], PARAMS), WAIT_S)
            assert len(request.generated_tokens) == 20
            assert failing.num_left == 0

    with LLM(directory(), inference_config=CONFIG) as llm:
        asyncio.run(work(llm))


def test_three_failed_steps_end_the_threaded_llm_with_their_error() -> None:
    async def work(llm: LLM) -> None:
        async with ThreadedLLM(llm) as threaded:
            FailingEngine(llm, num_failures=3)
            with pytest.raises(RuntimeError, match="the device is gone"):
                await asyncio.wait_for(threaded.generate([1], PARAMS), WAIT_S)
            error = await asyncio.wait_for(threaded.lost(), WAIT_S)
            assert "the device is gone" in str(error)
            with pytest.raises(EngineStateError, match="has ended"):
                await threaded.generate([1])

    with LLM(directory(), inference_config=CONFIG) as llm:
        asyncio.run(work(llm))


def test_generate_of_the_llm_is_refused_while_a_threaded_llm_steps_it() -> None:
    async def work(llm: LLM) -> None:
        async with ThreadedLLM(llm) as threaded:
            await threaded.generate([1], PARAMS)
            with pytest.raises(EngineStateError, match="another thread"):
                llm.generate([1], PARAMS)

    with LLM(directory(), inference_config=CONFIG) as llm:
        asyncio.run(work(llm))
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


def test_a_prompt_that_comes_while_the_thread_is_ending_is_refused() -> None:
    async def work(llm: LLM) -> None:
        threaded = SlowToEnd(llm)
        closing = asyncio.ensure_future(threaded.aclose())
        await asyncio.to_thread(threaded.is_done.wait)
        try:
            with pytest.raises(EngineStateError, match="has ended"):
                await asyncio.wait_for(threaded.generate([1]), WAIT_S)
        finally:
            threaded.may_end.set()
            await closing

    with LLM(directory(), inference_config=CONFIG) as llm:
        asyncio.run(work(llm))


def test_control_methods_are_awaited_and_requests_outlive_them() -> None:
    async def work(llm: LLM) -> None:
        async with ThreadedLLM(llm) as threaded:
            paused = paused_from_within(llm, num_steps=3)
            request = asyncio.ensure_future(threaded.generate([1, 2, 3], PARAMS))
            assert await asyncio.to_thread(paused.wait, WAIT_S)
            await threaded.suspend("recompute")
            assert threaded.state is EngineState.SUSPENDED
            policy = AutoModelForCausalLM.from_pretrained(directory())
            report = await WeightSync(threaded).apush(policy, version=7)
            assert report.version == threaded.weights_version == 7
            await threaded.resume()
            await threaded.unpause()
            done = await asyncio.wait_for(request, WAIT_S)
            assert set(done.policy_versions.tolist()) == {0, 7}
            assert (await threaded.stats()).num_finished == 1

    with LLM(directory(), inference_config=CONFIG) as llm:
        asyncio.run(work(llm))
