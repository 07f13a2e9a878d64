"""TimeAccount: every second of a step has one category, however blocks nest, fail or interleave."""

import asyncio
import random
import threading
import time
from contextlib import ExitStack
from dataclasses import fields

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout.control.reports import EngineStats
from rollout.control.state import EngineState
from rollout.errors import ConfigError, RolloutError
from trainer_hooks.metrics.time_account import CATEGORIES, EngineUse, StepTimes, TimeAccount
from trainer_hooks.phase import PhaseTimings


class Clock:
    """A clock that moves only by calls of `pass_s`."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s

    def pass_s(self, seconds: float) -> None:
        self.now_s += seconds


def assert_adds_up(times: StepTimes, wall_s: float) -> None:
    assert times.wall_s == pytest.approx(wall_s)
    assert sum(times.seconds.values()) == pytest.approx(wall_s, abs=1e-9)
    assert sum(times.shares.values()) == pytest.approx(1.0, abs=0.01)
    assert all(0.0 <= share <= 1.0 + 1e-9 for share in times.shares.values())


def test_time_account_charges_a_nested_block_alone() -> None:
    clock = Clock()
    account = TimeAccount(clock=clock)
    clock.pass_s(1)
    with account.spend("train"):
        clock.pass_s(2)
        with account.spend("update"):
            clock.pass_s(4)
        clock.pass_s(8)
    times = account.take()
    assert {name: s for name, s in times.seconds.items() if s} == {
        "train": 10.0,
        "update": 4.0,
        "other": 1.0,
    }
    assert times.shares["update"] == pytest.approx(4 / 15)
    assert_adds_up(times, 15.0)


NESTING = st.recursive(
    st.floats(0.0, 5.0),
    lambda inner: st.tuples(
        st.sampled_from(CATEGORIES), st.lists(inner, max_size=4), st.booleans()
    ),
    max_leaves=20,
)


class PassingFailureError(Exception):
    """An error raised inside blocks."""


def run_block(account: TimeAccount, clock: Clock, block: object) -> None:
    if isinstance(block, float):
        clock.pass_s(block)
        return
    category, inner, fails = block  # type: ignore[misc]
    try:
        with account.spend(category):
            for part in inner:
                run_block(account, clock, part)
            if fails:
                raise PassingFailureError
    except PassingFailureError:
        pass


@given(st.lists(st.lists(NESTING, max_size=6), min_size=1, max_size=4))
def test_time_account_shares_sum_to_one_for_any_nesting_with_exceptions(
    steps: list[list[object]],
) -> None:
    clock = Clock()
    account = TimeAccount(clock=clock)
    for blocks in steps:
        start_s = clock.now_s
        for block in blocks:
            run_block(account, clock, block)
        assert_adds_up(account.take(), clock.now_s - start_s)


def test_time_account_charges_a_block_across_steps_to_both() -> None:
    clock = Clock()
    account = TimeAccount(clock=clock)
    with account.spend("train"):
        clock.pass_s(1)
        assert account.take().seconds["train"] == 1.0
        clock.pass_s(2)
    assert account.take().seconds["train"] == 2.0


def test_time_account_counts_a_step_of_no_length_as_other() -> None:
    assert TimeAccount(clock=Clock()).take().shares["other"] == 1.0


def test_time_account_of_the_real_clock_agrees_with_the_wall() -> None:
    before_s = time.perf_counter()
    account = TimeAccount()
    start_s = time.perf_counter()
    for category in random.Random(0).choices(CATEGORIES, k=20):
        with account.spend(category), account.spend("train"):
            time.sleep(0.001)
    end_s = time.perf_counter()
    times = account.take()
    assert end_s - start_s <= times.wall_s <= time.perf_counter() - before_s
    assert_adds_up(times, times.wall_s)


def test_time_accounts_of_interleaving_tasks_each_add_up() -> None:
    async def timeline(seed: int) -> StepTimes:
        rng, account = random.Random(seed), TimeAccount()
        for _ in range(10):
            with account.spend(rng.choice(CATEGORIES)):
                await asyncio.sleep(rng.random() * 0.002)
                with account.spend(rng.choice(CATEGORIES)):
                    await asyncio.sleep(rng.random() * 0.002)
        return account.take()

    async def together() -> list[StepTimes]:
        return await asyncio.gather(*(timeline(seed) for seed in range(5)))

    for times in asyncio.run(together()):
        assert_adds_up(times, times.wall_s)


def test_time_account_refuses_a_second_task_and_the_first_continues() -> None:
    clock = Clock()

    async def together() -> TimeAccount:
        account = TimeAccount(clock=clock)
        opened, checked = asyncio.Event(), asyncio.Event()

        async def trainer() -> None:
            with account.spend("train"):
                opened.set()
                clock.pass_s(1)
                await checked.wait()

        async def producer() -> None:
            await opened.wait()
            with (
                pytest.raises(
                    RolloutError, match=r"'trainer' has 'train' open.*'producer' uses it"
                ),
                account.spend("reward"),
            ):
                pass
            with pytest.raises(RolloutError, match="two timelines"):
                account.take()
            checked.set()

        await asyncio.gather(
            asyncio.create_task(trainer(), name="trainer"),
            asyncio.create_task(producer(), name="producer"),
        )
        return account

    times = asyncio.run(together()).take()
    assert times.seconds["train"] == times.wall_s == 1.0


def test_time_account_refuses_a_second_thread_only_while_a_block_is_open() -> None:
    account, errors = TimeAccount(), []

    def use() -> None:
        try:
            with account.spend("reward"):
                pass
        except RolloutError as error:
            errors.append(str(error))

    def run_in_thread() -> None:
        thread = threading.Thread(target=use, name="rewards")
        thread.start()
        thread.join()

    with account.spend("train"):
        run_in_thread()
    run_in_thread()
    assert len(errors) == 1
    assert "thread 'rewards' uses it" in errors[0]


def test_time_account_blocks_closed_out_of_order_still_add_up() -> None:
    clock = Clock()
    account = TimeAccount(clock=clock)
    outer, inner = ExitStack(), ExitStack()
    outer.enter_context(account.spend("train"))
    inner.enter_context(account.spend("update"))
    clock.pass_s(1)
    outer.close()
    clock.pass_s(2)
    inner.close()
    times = account.take()
    assert times.seconds["update"] == 3.0
    assert_adds_up(times, 3.0)


def test_time_account_refuses_an_unknown_category_by_name() -> None:
    with pytest.raises(ConfigError, match=r"'sleep'.*generate, wait"), TimeAccount().spend("sleep"):
        pass


def test_reassign_phase_divides_a_phase_and_moves_no_more_than_there_was() -> None:
    clock = Clock()
    account = TimeAccount(clock=clock)
    with account.spend("generate"):
        clock.pass_s(10)
    account.reassign_phase(
        PhaseTimings(update_s=1.0, resume_s=2.0, generate_s=3.0, suspend_s=100.0)
    )
    times = account.take()
    assert (times.seconds["update"], times.seconds["resume"]) == (1.0, 2.0)
    assert (times.seconds["suspend"], times.seconds["generate"]) == (7.0, 0.0)
    assert_adds_up(times, 10.0)


def test_step_times_metrics_name_every_category() -> None:
    metrics = TimeAccount(clock=Clock()).take().as_metrics()
    assert set(metrics) == {"timing_s/step"} | {
        f"{kind}/{name}" for kind in ("timing_s", "timing_share") for name in CATEGORIES
    }


def stats_of(step_seconds: float, num_sampled_tokens: int) -> EngineStats:
    zeros = dict.fromkeys((f.name for f in fields(EngineStats)), 0)
    return EngineStats(
        **zeros
        | {
            "state": EngineState.RUNNING,
            "ranks": (),
            "step_seconds": step_seconds,
            "num_sampled_tokens": num_sampled_tokens,
        }
    )


def test_engine_use_idle_share_is_the_wall_time_without_steps() -> None:
    clock = Clock()
    use = EngineUse(num_engines=2, clock=clock)
    assert use.take(stats_of(5.0, 100)) == {}
    clock.pass_s(10)
    metrics = use.take(stats_of(20.0, 400))
    assert metrics == {
        "engine/busy_share": 0.75,
        "engine/idle_share": 0.25,
        "engine/tokens_per_s": 30.0,
    }
    clock.pass_s(10)
    restarted = use.take(stats_of(4.0, 50))
    assert restarted["engine/busy_share"] == 0.2
    assert restarted["engine/tokens_per_s"] == 5.0


def test_engine_use_refuses_zero_engines() -> None:
    with pytest.raises(ConfigError, match="num_engines=0"):
        EngineUse(num_engines=0)
