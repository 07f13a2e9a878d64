"""AsyncRolloutProducer over real engines: the bound on their tokens, and the batches of a plain
loop.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from rollout import LLM, AsyncLLM, InferenceConfig, SamplingParams
from rollout.apis.threaded_llm import ThreadedLLM
from rollout.step.seeds import mix_seed
from tests.apis.fleets import directory, weights, with_fleet
from tests.run_seed import run_seed
from tests.tiny_models import BLOCK_SIZE, IS_LONG, prompt_of
from tests.trainer_hooks.producer.test_bound import check_bound
from trainer_hooks import InProcessWeightSync
from trainer_hooks.producer import AsyncRolloutProducer, ProducerError
from trainer_hooks.prompts.ledger import PromptLedger

CONFIG = InferenceConfig(
    block_size_tokens=BLOCK_SIZE, max_sequence_length=512, buffer_size_gb=0.02, num_threads=1
)
PARAMS = SamplingParams(
    num_tokens_to_generate=12, return_log_probs=True, logprobs_mode="temperature"
)
PROMPTS = [prompt_of(3 + i % 7, seed=i) for i in range(20)]
SEED, GROUP_SIZE, BATCH_GROUPS = 5, 3, 2
Told = list[tuple[list[int], list[list[int]], list[float]]]


def parity(completion_ids: Sequence[Sequence[int]]) -> list[float]:
    return [float(sum(ids) % 2) for ids in completion_ids]


def plain_loop(llm: LLM, num_batches: int) -> list[Told]:
    """Return the batches of a plain loop: generate, score, update, one after the other."""
    ledger, batches = PromptLedger(PROMPTS, SEED), []
    for number in range(num_batches):
        batch: Told = []
        for _ in range(BATCH_GROUPS):
            ticket = ledger.issue()
            params = replace(PARAMS, seed=mix_seed(SEED, ticket.epoch, ticket.position, 0))
            prompt = ledger.item(ticket).prompt
            tokens = [r.generated_tokens for r in llm.generate(prompt, params, GROUP_SIZE)]
            batch.append((list(prompt), tokens, parity(tokens)))
        batches.append(batch)
        llm.update_weights(weights(1 + number % 2).state_dict(), in_flight=True)
    return batches


async def produced(llm: Any, pushes_to: Any, num_batches: int) -> list[Told]:
    """Return the batches of a producer that may not run ahead."""
    batches: list[Told] = []
    async with AsyncRolloutProducer(
        llm, PROMPTS, parity, GROUP_SIZE, BATCH_GROUPS, 0, sampling_params=PARAMS, seed=SEED
    ) as producer:
        for number in range(num_batches):
            batch = await anext(producer)
            check_bound(batch, 0)
            batches.append(
                [
                    (group.item.prompt, [r.generated_tokens for r in group.requests], group.rewards)
                    for group in batch.groups
                ]
            )
            update = pushes_to.update_weights(weights(1 + number % 2).state_dict(), in_flight=True)
            if asyncio.iscoroutine(update):
                await update
    return batches


def test_producer_without_staleness_makes_the_batches_of_a_plain_loop() -> None:
    with LLM(directory(), inference_config=CONFIG) as llm:
        expected = plain_loop(llm, 4)

    async def threaded() -> list[Told]:
        with LLM(directory(), inference_config=CONFIG) as llm:
            async with ThreadedLLM(llm) as wrapped:
                return await produced(wrapped, llm, 4)

    async def fleet(llm: AsyncLLM) -> None:
        assert await produced(llm, llm, 4) == expected

    assert asyncio.run(threaded()) == expected
    if IS_LONG:
        with_fleet(2, fleet)


def test_producer_error_names_why_all_requests_failed() -> None:
    prompts = [prompt_of(600, seed=i) for i in range(2)]

    async def work() -> None:
        with LLM(directory(), inference_config=CONFIG) as llm:
            async with (
                ThreadedLLM(llm) as threaded,
                AsyncRolloutProducer(
                    threaded, prompts, parity, 2, 1, 0, sampling_params=PARAMS, max_refills=1
                ) as producer,
            ):
                with pytest.raises(ProducerError, match=r"2 failed .*600.*max_sequence_length=512"):
                    await anext(producer)

    asyncio.run(work())


async def train(
    llm: AsyncLLM, bound: int, num_batches: int, rng: random.Random, slow: str
) -> Counter[int]:
    """Train for a few steps. Returns the number of tokens of each age."""
    ages: Counter[int] = Counter()
    sync = InProcessWeightSync(llm)

    async def reward(completion_ids: Sequence[Sequence[int]]) -> list[float]:
        await asyncio.sleep(rng.random() * (0.3 if slow == "reward" else 0.02))
        return parity(completion_ids)

    long = 40 if slow == "generation" else 12
    params = replace(PARAMS, num_tokens_to_generate=long)
    async with AsyncRolloutProducer(
        llm, PROMPTS, reward, GROUP_SIZE, BATCH_GROUPS, bound, sampling_params=params, seed=SEED
    ) as producer:
        start = producer.version
        for number in range(num_batches):
            batch = await anext(producer)
            check_bound(batch, bound)
            assert batch.version == start + number
            lags = batch.rollouts.policy_lag_BT[batch.rollouts.mask_BT]
            ages.update(lags.tolist())
            await asyncio.sleep(rng.random() * (0.3 if slow == "training" else 0.02))
            if rng.random() < 0.5:
                await llm.update_weights(weights(1 + number % 3).state_dict(), in_flight=True)
            else:
                await llm.pause()
                await llm.suspend(rng.choice(["persist", "offload", "recompute"]))
                await sync.apush(weights(1 + number % 3))
                await llm.resume()
                await llm.unpause()
        assert producer.ledger.consumed["trained"] == num_batches * BATCH_GROUPS
        assert not producer.ledger.given_back
    return ages


@pytest.mark.parametrize("size", [1, 2])
def test_producer_over_real_engines_keeps_the_bound(size: int) -> None:
    if size == 2 and not IS_LONG:
        pytest.skip("one engine is enough for the quick suite")
    num_batches = 8 // size if IS_LONG else 3
    slows = ("generation", "reward", "training") if IS_LONG else ("generation",)
    seen: dict[int, Counter[int]] = {}

    async def work(llm: AsyncLLM) -> None:
        for bound in (0, 1, 2, 4):
            seen[bound] = Counter()
            for slow in slows:
                rng = random.Random(run_seed() + bound)
                seen[bound] += await train(llm, bound, num_batches, rng, slow)

    with_fleet(size, work)
    print({bound: dict(sorted(ages.items())) for bound, ages in seen.items()})
    for bound, ages in seen.items():
        assert max(ages) <= bound
        assert sum(ages.values()) >= num_batches * BATCH_GROUPS * GROUP_SIZE * 10
    assert max(seen[2]) > 0, "staleness was really there"
