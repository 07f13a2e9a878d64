"""The staleness bound: no token beyond it in any batch, at adversarial timing, in virtual time."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.virtual_time import run_virtually
from tests.tiny_models import IS_LONG
from tests.trainer_hooks.producer.fake_llm import FakeLLM, random_delays
from trainer_hooks.producer import AsyncRolloutProducer, TrainingBatch

NUM_PROMPTS = 23
ORDERS = ["admission", "ready"]
NUM_EXAMPLES = 500 if IS_LONG else 25


def check_bound(batch: TrainingBatch, bound: int) -> int:
    """Return the largest age of a token, masked or not."""
    ages = [
        batch.version - int(version)
        for group in batch.groups
        for request in group.requests
        for version in request.policy_versions
    ]
    assert min(ages) >= 0
    assert max(ages) <= bound
    assert int(batch.rollouts.policy_lag_BT.max()) <= bound
    return max(ages)


def prompts() -> list[list[int]]:
    return [[i, i + 1] for i in range(NUM_PROMPTS)]


@settings(max_examples=NUM_EXAMPLES, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    bound=st.sampled_from([0, 1, 2, 4]),
    extra=st.integers(0, 2),
    filters=st.booleans(),
    failure_rate=st.sampled_from([0.0, 0.2]),
    slow=st.sampled_from(["generation", "reward", "training"]),
    order=st.sampled_from(ORDERS),
)
def test_producer_returns_no_token_older_than_the_bound_and_loses_no_prompt(
    seed: int, bound: int, extra: int, filters: bool, failure_rate: float, slow: str, order: Any
) -> None:
    rng = random.Random(seed)
    llm = FakeLLM(
        random_delays(rng, 20.0 if slow == "generation" else 1.0),
        fails=lambda seed: seed % 1000 < 1000 * failure_rate,
    )

    async def reward(completion_ids: list[list[int]], **columns: Any) -> list[float | None]:
        await asyncio.sleep(rng.random() * (20.0 if slow == "reward" else 0.5))
        return [None if ids[0] % 17 == 0 else float(ids[0] % 2) for ids in completion_ids]

    async def train() -> Counter[str]:
        producer = AsyncRolloutProducer(
            llm,
            prompts(),
            reward,
            3,
            2,
            bound,
            seed=seed,
            num_epochs=2,
            oversample_groups=extra,
            order=order,
            max_reissues=2,
            drop_zero_variance=filters,
            max_refills=1000,
        )
        fates: Counter[str] = Counter()
        async with producer:
            number = 0
            async for batch in producer:
                check_bound(batch, bound)
                assert batch.index == number
                assert batch.version == number, "one batch makes one version"
                assert batch.admitted_at_version >= number - bound
                for name, count in batch.metrics.items():
                    if name.startswith("rollouts/"):
                        fates[name] += int(count)
                await asyncio.sleep(rng.random() * (20.0 if slow == "training" else 0.5))
                await llm.push(lag_s=rng.random())
                number += 1
                assert llm.num_running <= (bound + 1) * (2 + extra) * 3, "no growth"
            consumed = producer.ledger.consumed
            assert sum(consumed.values()) == 2 * NUM_PROMPTS, "each prompt has a fate"
            assert producer.ledger.num_out == 0
            assert consumed["trained"] == fates["rollouts/num_groups"]
        assert llm.num_running == 0
        return fates

    run_virtually(train())


@settings(max_examples=NUM_EXAMPLES, deadline=None)
@given(
    seed=st.integers(0, 2**32), bound=st.sampled_from([0, 1, 2, 4]), order=st.sampled_from(ORDERS)
)
def test_producer_keeps_the_bound_if_versions_rise_without_batches(
    seed: int, bound: int, order: Any
) -> None:
    rng = random.Random(seed)
    llm = FakeLLM(random_delays(rng, 4.0))
    num_stale = 0

    async def intrude() -> None:
        for _ in range(30):
            await asyncio.sleep(rng.random() * 40.0)
            await llm.push(lag_s=rng.random())

    async def train() -> None:
        nonlocal num_stale
        intruder = asyncio.ensure_future(intrude())
        async with AsyncRolloutProducer(
            llm, prompts(), any_reward, 2, 3, bound, seed=seed, max_refills=10_000, order=order
        ) as producer:
            for _ in range(12):
                batch = await anext(producer)
                check_bound(batch, bound)
                num_stale += int(batch.metrics["rollouts/num_stale_groups"])
                await asyncio.sleep(rng.random() * 10.0)
                await llm.push()
            assert producer.ledger.given_back["stale"] >= num_stale
        intruder.cancel()
        await asyncio.gather(intruder, return_exceptions=True)

    run_virtually(train())


async def any_reward(completion_ids: list[list[int]]) -> list[float]:
    return [float(ids[0]) for ids in completion_ids]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("bound", [0, 1, 2, 4])
def test_producer_uses_the_whole_bound_if_training_is_quick(bound: int, order: Any) -> None:
    # Generation is the slow part: a trainer that waits for it has the oldest tokens there may be.
    llm = FakeLLM()

    async def train() -> set[int]:
        ages = set()
        async with AsyncRolloutProducer(
            llm, prompts(), any_reward, 2, 2, bound, order=order
        ) as producer:
            for _ in range(12):
                ages.add(check_bound(await anext(producer), bound))
                await llm.push()
        return ages

    assert max(run_virtually(train())) == bound
