"""An asynchronous LLM that samples by a script of delays."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from typing import Any

from rollout.requests import DynamicInferenceRequest, Status
from rollout.sampling_params import SamplingParams
from rollout.step.seeds import mix_seed
from tests.trainer_hooks.fakes import finished_request
from trainer_hooks.producer import AsyncRolloutProducer, TrainingBatch


class FakeLLM:
    """An AsyncLLM whose tokens take `delay_s()` seconds each and have the version served at that
    time.

    Tokens are a function of seed, position and version. `fails(seed)`: whether a request fails.
    `weights_version` rises `lag_s` seconds after `push` lets the engines serve a version.
    """

    tokenizer = None

    def __init__(
        self,
        delay_s: Callable[[], float] = lambda: 1.0,
        *,
        num_tokens: int = 3,
        fails: Callable[[int], bool] = lambda seed: False,
        weights_version: int = 0,
    ) -> None:
        self._delay_s, self._num_tokens, self._fails = delay_s, num_tokens, fails
        self.weights_version = self.served_version = weights_version
        self.num_running = self.num_started = self.num_cancelled = 0
        self.seeds: list[int] = []

    async def generate(
        self,
        prompts: Any,
        sampling_params: SamplingParams | None = None,
        n: int = 1,
        *,
        on_finished: Callable[[], None] | None = None,
    ) -> Any:
        params = sampling_params or SamplingParams()
        seeds = [mix_seed(params.seed or 0, 0, sample) for sample in range(n)]

        async def one(seed: int) -> DynamicInferenceRequest:
            request = await self._one(prompts, params, seed)
            if on_finished is not None:
                on_finished()
            return request

        requests = await asyncio.gather(*map(one, seeds))
        return requests[0] if n == 1 else list(requests)

    async def _one(
        self, prompt: Sequence[int], params: SamplingParams, seed: int
    ) -> DynamicInferenceRequest:
        self.num_running += 1
        self.num_started += 1
        self.seeds.append(seed)
        try:
            tokens, versions = [], []
            for position in range(self._num_tokens):
                await asyncio.sleep(self._delay_s())
                versions.append(self.served_version)
                tokens.append(mix_seed(seed, position, self.served_version) % 100)
            status = Status.FAILED if self._fails(seed) else Status.COMPLETED
            return finished_request(prompt, tokens, versions=versions, params=params, status=status)
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise
        finally:
            self.num_running -= 1

    async def push(self, lag_s: float = 0.0) -> None:
        """Serve the next version, and report it a little later, as a fleet does."""
        self.served_version += 1
        await asyncio.sleep(lag_s)
        self.weights_version = self.served_version


async def train(
    llm: FakeLLM,
    producer: AsyncRolloutProducer,
    num_batches: int | None = None,
    step_s: float = 0.0,
) -> list[TrainingBatch]:
    """Take batches and make a version from each in `step_s` seconds."""
    batches = []
    async for batch in producer:
        batches.append(batch)
        await asyncio.sleep(step_s)
        await llm.push()
        if len(batches) == num_batches:
            break
    return batches


def levels(batch: TrainingBatch) -> list[int]:
    """Return the column `level` of the batch's prompts, in order."""
    return [item.columns["level"] for item in batch.items]


def random_delays(rng: random.Random, longest_s: float) -> Callable[[], float]:
    """Return random delays, mostly short and sometimes very long."""
    return lambda: rng.choice([0.0, rng.random(), rng.random() * longest_s])
