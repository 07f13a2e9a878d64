"""EssBound: the bound that follows the effective sample size, and the producer under it."""

from __future__ import annotations

import asyncio
import json
import math
import random
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.virtual_time import run_virtually
from rollout.errors import ConfigError
from tests.tiny_models import IS_LONG
from tests.trainer_hooks.producer.fake_llm import FakeLLM, random_delays
from tests.trainer_hooks.producer.test_bound import (
    NUM_PROMPTS,
    ORDERS,
    any_reward,
    check_bound,
    prompts,
)
from trainer_hooks.producer import AsyncRolloutProducer, EssBound, TrainingBatch
from trainer_hooks.producer.batches import mean_lag
from trainer_hooks.producer.staleness import StalenessBound
from trainer_hooks.train.config_loading import load_dataclass
from trainer_hooks.train.settings import ProducerSettings

NUM_EXAMPLES = 300 if IS_LONG else 25


def ess_at(rate: float, lag: float) -> float:
    """Return the ESS of a policy whose log-ratios gain the variance `rate` with each version."""
    return math.exp(-rate * lag)


def with_versions(state: dict[str, Any], versions: int) -> dict[str, Any]:
    """Return the state of a bound, or of a producer, whose bound is `versions`."""
    return state | {"staleness": state["staleness"] | {"versions": versions}}


def set_versions(bound: StalenessBound, versions: int) -> None:
    bound.load_state_dict(with_versions(bound.state_dict(), versions))


def observe(bound: StalenessBound, ess: float, lag: float) -> int:
    """Return the bound after a batch of tokens that are `lag` versions old."""
    bound.record_delivery(lag)
    return bound.observe(ess)


# ---- the rule


def test_ess_bound_rises_by_one_after_patience_batches() -> None:
    bound = StalenessBound("ess")
    assert [observe(bound, ess_at(0.05, 1.0), 1.0) for _ in range(7)] == [1, 1, 2, 2, 2, 3, 3]


def test_ess_bound_rises_until_the_next_would_fall_below_raising_ess() -> None:
    bound = StalenessBound("ess")
    for _ in range(60):
        observe(bound, ess_at(0.05, bound.versions), bound.versions)
    assert bound.versions == 6, "0.05 * 6 <= ln(2) / 2 < 0.05 * 7"


def test_ess_bound_falls_at_once_to_keep_least_ess() -> None:
    bound = StalenessBound(EssBound(least=0))
    set_versions(bound, 8)
    assert observe(bound, ess_at(0.2, 8.0), 8.0) == 3, "exp(-0.2 * 3) >= 0.5 > exp(-0.2 * 4)"
    assert observe(bound, ess_at(5.0, 3.0), 3.0) == 0


def test_ess_bound_is_not_moved_by_noise() -> None:
    bound = StalenessBound("ess")
    set_versions(bound, 4)
    rng = random.Random(0)
    for _ in range(200):
        lag = rng.uniform(1.0, 4.0)
        observe(bound, ess_at(rng.uniform(0.08, 0.16), lag), lag)
    assert bound.versions == 4


def test_ess_bound_ignores_batches_without_a_lag_but_retries_from_0() -> None:
    bound = StalenessBound("ess")
    assert [observe(bound, 0.3, 0.0) for _ in range(9)] == [1] * 9
    at_zero = StalenessBound(EssBound(least=0))
    assert [observe(at_zero, 1.0, 0.0) for _ in range(4)] == [0, 0, 1, 1]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: StalenessBound(-1), "max_staleness_versions=-1 must be 0 or more"),
        (lambda: StalenessBound("kl"), "max_staleness_versions='kl' must be a number, or 'ess'"),  # type: ignore[arg-type]
        (lambda: EssBound(least=3, most=2), "least=3 and most=2"),
        (lambda: EssBound(least_ess=0.8), "least_ess=0.8 and raising_ess=0.7"),
        (lambda: EssBound(patience=0), "patience=0 must be .*at least 1"),
        (lambda: observe(StalenessBound(1), float("nan"), 1.0), "effective sample size nan"),
        (lambda: observe(StalenessBound(1), 0.0, 1.0), r"sample size 0.0 must be in \(0, 1\]"),
    ],
)
def test_ess_bound_refuses_settings_out_of_range(make: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


def test_staleness_bound_of_a_number_never_changes() -> None:
    bound = StalenessBound(2)
    assert [observe(bound, ess, 2.0) for ess in (0.01, 1.0, 1.0, 1.0)] == [2] * 4
    assert bound.metrics() == {"producer/max_staleness_versions": 2, "producer/ess": 1.0}
    assert bound.state_dict() == {}
    bound.load_state_dict(StalenessBound("ess").state_dict())
    assert bound.versions == 2


def test_max_staleness_versions_accepts_ess_and_no_other_text() -> None:
    settings = load_dataclass(ProducerSettings, {"max_staleness_versions": "ess"})
    assert settings.max_staleness_versions == "ess"
    with pytest.raises(
        ConfigError, match="max_staleness_versions='kl' must be an integer or one of ess"
    ):
        load_dataclass(ProducerSettings, {"max_staleness_versions": "kl"})


# ---- the producer under it


async def bounds_of(rates: list[float], order: Any, **options: Any) -> list[int]:
    """Return the bound after each batch of a policy that moves by `rates` in turn."""
    llm, bounds = FakeLLM(), []
    async with AsyncRolloutProducer(
        llm, prompts(), any_reward, 2, 2, "ess", order=order, **options
    ) as producer:
        for rate in rates:
            batch = await anext(producer)
            check_bound(batch, producer.max_staleness_versions)
            ess = ess_at(rate, mean_lag(batch.rollouts))
            bounds.append(producer.observe_effective_sample_size(ess))
            assert batch.metrics["producer/max_staleness_versions"] == ([1, *bounds])[-2]
            await llm.push()
    return bounds


@pytest.mark.parametrize("order", ORDERS)
def test_ess_bound_rises_for_a_slow_policy_and_falls_for_a_fast_one(order: Any) -> None:
    bounds = run_virtually(bounds_of([0.01] * 24 + [0.6] * 4, order))
    assert max(bounds) >= 6
    assert bounds[-1] == 1


@settings(max_examples=NUM_EXAMPLES, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    extra=st.integers(0, 2),
    slow=st.sampled_from(["generation", "reward", "training"]),
    order=st.sampled_from(ORDERS),
    least=st.integers(0, 1),
)
def test_producer_under_a_changing_bound_keeps_it_and_loses_no_prompt(
    seed: int, extra: int, slow: str, order: Any, least: int
) -> None:
    """The bound changes at random, and the run is killed at random and resumed from its state."""
    rng = random.Random(seed)
    trained: Counter[int] = Counter()

    async def reward(completion_ids: list[list[int]], **columns: Any) -> list[float | None]:
        await asyncio.sleep(rng.random() * (20.0 if slow == "reward" else 0.5))
        return [float(ids[0] % 7) for ids in completion_ids]

    def count(batch: TrainingBatch) -> None:
        trained.update(
            group.ticket.epoch * NUM_PROMPTS + group.ticket.index for group in batch.groups
        )

    async def run(version: int, state: Any, num_batches: int) -> tuple[int, Any, bool]:
        """Until `num_batches` are trained; version, state, and whether all prompts are done."""
        delays = random_delays(rng, 20.0 if slow == "generation" else 1.0)
        llm = FakeLLM(delays, weights_version=version)
        rule = EssBound(least=least, most=5, patience=1, smoothing=1.0)
        producer = AsyncRolloutProducer(
            llm,
            prompts(),
            reward,
            2,
            2,
            rule,
            seed=seed,
            num_epochs=2,
            oversample_groups=extra,
            order=order,
            max_reissues=2,
            max_refills=10_000,
        )
        if state is not None:
            producer.load_state_dict(state)
            assert producer.max_staleness_versions == state["staleness"]["versions"]
        async with producer:
            async for batch in producer:
                check_bound(batch, producer.max_staleness_versions)
                count(batch)
                await asyncio.sleep(rng.random() * (20.0 if slow == "training" else 0.5))
                producer.observe_effective_sample_size(rng.choice([0.05, 0.4, 0.8, 0.99, 1.0]))
                await llm.push(lag_s=rng.random())
                assert producer.ledger.num_out <= 6 * (2 + extra), "no growth"
                if batch.index + 1 == num_batches:
                    state = json.loads(json.dumps(producer.state_dict()))
                    return llm.weights_version, state, False
            assert producer.ledger.num_out == 0
        assert llm.num_running == 0
        return llm.weights_version, None, True

    async def work() -> None:
        version, state, is_over = 0, None, False
        while not is_over:
            version, state, is_over = await run(version, state, rng.randint(2, 8))

    run_virtually(work())
    assert trained == Counter(dict.fromkeys(range(2 * NUM_PROMPTS), 1)), "once per epoch"


def test_lower_bound_gives_back_and_counts_groups_begun_too_early() -> None:
    async def work() -> None:
        llm = FakeLLM()
        rule = EssBound(least=0, most=4, patience=1)
        producer = AsyncRolloutProducer(
            llm, prompts(), any_reward, 2, 2, rule, shuffle=False, num_epochs=1
        )
        async with producer:
            batch = await anext(producer)
            while producer.max_staleness_versions < 4 or not mean_lag(batch.rollouts):
                producer.observe_effective_sample_size(0.999)
                await llm.push()
                batch = await anext(producer)
            num_out = producer.ledger.num_out
            assert num_out > 2
            assert producer.observe_effective_sample_size(1e-9) == 0
            assert producer.ledger.num_out == 0
            assert producer.ledger.given_back["stale"] == num_out
            await llm.push()
            after = await anext(producer)
            assert check_bound(after, 0) == 0
            assert after.metrics["rollouts/num_stale_groups"] == num_out
            first = 2 * (batch.index + 1)
            assert [g.ticket.index for g in after.groups] == [first, first + 1], "in their order"

    run_virtually(work())


def test_higher_bound_leaves_admission_order_unchanged() -> None:
    async def work() -> list[int]:
        llm, order = FakeLLM(), []
        rule = EssBound(most=4, patience=1)
        async with AsyncRolloutProducer(
            llm, prompts(), any_reward, 2, 2, rule, shuffle=False, num_epochs=1
        ) as producer:
            async for batch in producer:
                order += [group.ticket.index for group in batch.groups]
                producer.observe_effective_sample_size(0.999)
                await llm.push()
            assert producer.max_staleness_versions == 4
        return order

    assert run_virtually(work()) == list(range(NUM_PROMPTS))


@pytest.mark.parametrize("order", ORDERS)
def test_lower_bound_wakes_anext_that_waits_for_a_discarded_batch(order: Any) -> None:
    """The next batch is asked for while the last one is trained on."""

    async def work() -> None:
        llm, bound = FakeLLM(), EssBound(least=0)
        producer = AsyncRolloutProducer(
            llm, prompts(), any_reward, 2, 2, bound, order=order, version_timeout_s=9.0
        )
        producer.load_state_dict(with_versions(producer.state_dict(), 1))
        async with producer:
            await anext(producer)
            await llm.push()
            assert mean_lag((await anext(producer)).rollouts) > 0.0
            waiting = asyncio.ensure_future(anext(producer))
            await asyncio.sleep(0)
            assert producer.observe_effective_sample_size(1e-9) == 0
            await llm.push()
            batch = await asyncio.wait_for(waiting, 60.0)
            assert check_bound(batch, 0) == 0

    run_virtually(work())


@pytest.mark.parametrize("order", ORDERS)
def test_nothing_begins_before_a_producer_is_entered_or_after_it_is_closed(order: Any) -> None:
    async def work() -> None:
        llm, bound = FakeLLM(), EssBound(least=0)
        producer = AsyncRolloutProducer(llm, prompts(), any_reward, 2, 2, bound, order=order)
        producer.load_state_dict(with_versions(producer.state_dict(), 1))
        assert producer.ledger.num_out == 0
        async with producer:
            await anext(producer)
            await llm.push()
            assert mean_lag((await anext(producer)).rollouts) > 0.0
        assert producer.observe_effective_sample_size(1e-9) == 0
        assert producer.ledger.num_out == 0

    run_virtually(work())
