"""Random work on tiny engines: each request gets the tokens that it would get alone."""

from __future__ import annotations

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fakes import values_of
from tests.run_seed import run_seed
from tests.scheduling.oracle import Sizes
from tests.scheduling.random_work import Op, ops, seeded_work, sizes
from tests.scheduling.rig import Rig

ENDED = {"done", "aborted"}
IS_LONG = bool(os.environ.get("ROLLOUT_TEST_LONG"))


def run_to_the_end(small: Sizes, work: list[Op]) -> Rig:
    """The rig compares the tokens of each request, as it ends, with those that it gets alone."""
    rig = Rig(small)
    for op in work:
        op(rig)
    rig.drain()
    return rig


def phases(rig: Rig) -> set[str]:
    return {known.phase for known in rig.known.values()}


@given(sizes(depths=st.just(1)), st.lists(ops(), max_size=40))
def test_every_request_gets_its_tokens_whatever_happens_around_it(
    small: Sizes, work: list[Op]
) -> None:
    assert phases(run_to_the_end(small, work)) <= ENDED


@given(sizes(depths=st.integers(2, 3)), st.lists(ops(), max_size=40))
def test_every_request_gets_its_tokens_with_plans_made_ahead(small: Sizes, work: list[Op]) -> None:
    assert phases(run_to_the_end(small, work)) <= ENDED


@pytest.mark.drawn(5)
@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("part", range(5))
def test_crowded_engines_keep_all_invariants(depth: int, part: int) -> None:
    num_seeds = 100 if IS_LONG else 6
    for seed in range(part * num_seeds, (part + 1) * num_seeds):
        rig = run_to_the_end(*seeded_work(run_seed() + seed, depth=depth))
        assert phases(rig) <= ENDED


@pytest.mark.drawn(10)
@pytest.mark.parametrize("seed", range(100 if IS_LONG else 30))
def test_two_schedulers_fed_one_inbox_make_equal_plans(seed: int) -> None:
    depth = 1 + seed % 2
    work = [seeded_work(run_seed() + seed, depth=depth, num_ops=25) for _ in range(2)]
    first, second = run_to_the_end(*work[0]), run_to_the_end(*work[1])
    assert list(map(values_of, first.plans)) == list(map(values_of, second.plans))


def test_crowded_engines_pause_resume_preempt_fork_and_copy() -> None:
    rigs = [run_to_the_end(*seeded_work(seed, depth=2)) for seed in range(20)]
    schedules = [schedule for rig in rigs for schedule in rig.schedules]
    assert sum(schedule.num_forked for schedule in schedules) > 20
    for name in ("paused", "resumed", "preempted"):
        assert sum(len(getattr(schedule, name)) for schedule in schedules) > 20
    assert sum(len(plan.copy_sources) for rig in rigs for plan in rig.plans) > 20
