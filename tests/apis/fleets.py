"""A tiny model in several versions, fleets that serve it, and load for them."""

from __future__ import annotations

import asyncio
import atexit
import shutil
import tempfile
from collections.abc import Awaitable, Callable
from functools import cache
from typing import Any

from rollout import AsyncLLM, DynamicInferenceRequest, InferenceConfig, SamplingParams
from tests.tiny_models import prompt_of, tiny_model
from tests.waiting import until_async as until

CONFIG = InferenceConfig(
    block_size_tokens=8, max_sequence_length=512, buffer_size_gb=0.02, num_threads=1
)
DEADLINE_S = 400.0  # of a whole test: its processes may share a processor with many others


@cache
def weights(version: int = 0) -> Any:
    """The model that version `version` is."""
    return tiny_model("qwen3", seed=30 + version)


@cache
def directory() -> str:
    """Version 0 for engine processes, which need no transformers to read it."""
    path = tempfile.mkdtemp(prefix="rollout-test-")
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    weights().save_pretrained(path)
    return path


def params(seed: int, num_tokens: int = 20, **changes: Any) -> SamplingParams:
    """Greedy for even seeds."""
    return SamplingParams(
        num_tokens_to_generate=num_tokens, seed=seed, temperature=(0.0, 1.0)[seed % 2], **changes
    )


def with_fleet(
    size: int, work: Callable[[AsyncLLM], Awaitable[None]], *, tokenizer: Any = None
) -> None:
    """Do `work` with an AsyncLLM of `size` engines."""

    async def run() -> None:
        async with AsyncLLM(directory(), tokenizer, CONFIG, data_parallel_size=size) as llm:
            await asyncio.wait_for(work(llm), DEADLINE_S)

    asyncio.run(run())


class Load:
    """`width` requests at any time, each with a seed and a prompt of its own, until it is told to
    end; each after the first ones waits `rest_s` seconds. `finished` by seed.
    """

    def __init__(self, llm: AsyncLLM, width: int, num_tokens: int, rest_s: float = 0.0) -> None:
        self._llm, self._num_tokens, self._rest_s = llm, num_tokens, rest_s
        self.num_begun = 0
        self.finished: dict[int, DynamicInferenceRequest] = {}
        self._is_ending = False
        self._tasks = [asyncio.ensure_future(self._run()) for _ in range(width)]

    async def _run(self) -> None:
        while not self._is_ending:
            seed = self.num_begun
            self.num_begun += 1
            num_tokens = self._num_tokens // 2 + seed * 7 % self._num_tokens
            request = await self._llm.generate(
                prompt_of(1 + seed * 5 % 23, seed), params(seed, num_tokens)
            )
            assert isinstance(request, DynamicInferenceRequest)
            assert seed not in self.finished
            assert len(request.generated_tokens) == num_tokens
            self.finished[seed] = request
            await asyncio.sleep(self._rest_s)

    async def more(self, count: int) -> None:
        """Wait until so many more have finished."""
        wanted = len(self.finished) + count

        def is_enough() -> bool:
            for task in self._tasks:
                if task.done():
                    task.result()
            return len(self.finished) >= wanted

        await until(is_enough, f"{count} more requests finish")

    async def end(self) -> list[DynamicInferenceRequest]:
        """Begin no more, wait for the last; all of them."""
        self._is_ending = True
        await asyncio.gather(*self._tasks)
        assert len(self.finished) == self.num_begun, "each is answered"
        ids = [request.request_id for request in self.finished.values()]
        assert len(set(ids)) == len(ids), "and once"
        return list(self.finished.values())
