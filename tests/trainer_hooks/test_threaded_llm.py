"""An LLM in this process, awaited."""

from __future__ import annotations

import asyncio

import pytest

from rollout import LLM, EngineStateError, InferenceConfig, InvalidRequestError, SamplingParams
from tests.apis.fleets import directory
from tests.tiny_models import BLOCK_SIZE, prompt_of
from trainer_hooks.threaded_llm import ThreadedLLM

CONFIG = InferenceConfig(
    block_size_tokens=BLOCK_SIZE, max_sequence_length=512, buffer_size_gb=0.02, num_threads=1
)
PARAMS = SamplingParams(num_tokens_to_generate=20, seed=3)


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
                    await threaded.generate([], PARAMS)
            with pytest.raises(EngineStateError, match="has ended"):
                await threaded.generate(prompts[0], PARAMS)

        asyncio.run(work())
        assert llm.generate(prompts[0], PARAMS).succeeded(), "the LLM stays"


def test_cancelling_aborts_and_a_pause_only_delays() -> None:
    async def work(llm: LLM) -> None:
        async with ThreadedLLM(llm) as threaded:
            endless = SamplingParams(num_tokens_to_generate=480)
            tasks = [asyncio.ensure_future(threaded.generate([1], endless)) for _ in range(3)]
            await asyncio.sleep(0.05)
            llm.pause()
            tasks[0].cancel()
            late = asyncio.ensure_future(threaded.generate([2], PARAMS))
            await asyncio.sleep(0.1)
            assert not late.done()
            llm.suspend("offload")
            llm.resume()
            llm.unpause()
            assert len((await late).generated_tokens) == 20
            assert len((await tasks[1]).generated_tokens) == 480
            last = asyncio.ensure_future(threaded.generate([1], endless))
            await asyncio.sleep(0.02)
        for task in (tasks[0], last):
            with pytest.raises((asyncio.CancelledError, EngineStateError)):
                await task
        assert not llm.engine.has_unfinished_requests()

    with LLM(directory(), inference_config=CONFIG) as llm:
        asyncio.run(asyncio.wait_for(work(llm), 120))
