"""Plans that are made before the results of plans in flight are known."""

from __future__ import annotations

import pytest

from rollout.version_spans import VersionSpans
from tests.scheduling.oracle import Sample, Sizes, limit, prompt, run_alone
from tests.scheduling.rig import Rig


def test_a_row_that_the_step_before_finished_is_discarded_and_its_blocks_freed_after() -> None:
    rig = Rig(Sizes(depth=2))
    first, _ = run_alone(prompt(4), Sample(), limit(5))
    rig.add(prompt(4), Sample(end_ids=(first[0],)))
    rig.schedule()
    rig.schedule()
    rig.run()
    (finished,) = rig.commit().finished
    assert finished.finish_reason == "stop"
    assert finished.kv_spans == VersionSpans([(4, 0)])
    assert rig.kv_cache_manager.used_blocks() == [1, 2]
    rig.run()
    assert rig.commit().request_ids == []
    assert finished.kv_spans == VersionSpans([(4, 0)])
    assert rig.kv_cache_manager.used_blocks() == []


def test_the_row_of_a_request_aborted_in_flight_stays_taken() -> None:
    rig = Rig(Sizes(num_rows=1, depth=2))
    rig.add(prompt(4), Sample())
    rig.add(prompt(4), Sample())
    rig.schedule()
    rig.abort(0)
    assert rig.schedule() is None
    rig.settle()
    rig.drain()
    assert rig.known[1].finish_reason == "length"


def test_nothing_is_planned_beyond_the_last_token() -> None:
    rig = Rig(Sizes(depth=3))
    rig.add(prompt(4), Sample(num_new=2))
    rig.schedule()
    rig.schedule()
    assert rig.schedule() is None
    rig.drain()


def test_a_fork_is_copied_on_write_before_its_prefill_is_committed() -> None:
    rig = Rig(Sizes(num_blocks=12, depth=3))
    rig.add(prompt(6), *(Sample(seed=seed, num_new=6) for seed in range(3)))
    for _ in range(3):
        rig.schedule()
    assert [len(plan.copy_sources) for plan in rig.plans] == [0, 2, 0]
    rig.drain()


def test_the_oldest_keeps_its_blocks_while_those_it_waits_for_are_in_flight() -> None:
    rig = Rig(Sizes(num_blocks=4, block_size=2, num_rows=2, max_paused_blocks=0, depth=2))
    rig.add(prompt(1), Sample(num_new=5, wants_scores=True), Sample(wants_scores=True))
    rig.step()
    rig.fail_step(after_writes=False)
    rig.drain()
    assert not any(0 in s.preempted for s in rig.schedules)


@pytest.mark.parametrize(
    ("max_paused_blocks", "paused"), [(0, [(0, 1), ()]), (6, [(0,), (1,), ()])]
)
def test_a_newer_request_in_flight_is_paused_at_once_where_none_may_stay_paused(
    max_paused_blocks: int, paused: list[tuple[int, ...]]
) -> None:
    """It is preempted in the next step, and the older one gets its blocks. With a buffer for paused
    requests it goes on until it lacks a block itself."""
    rig = Rig(Sizes(num_blocks=6, block_size=2, max_paused_blocks=max_paused_blocks, depth=2))
    for num_tokens in (4, 3):
        rig.add(prompt(num_tokens), Sample(num_new=8))
    rig.drain()
    first = next(number for number, s in enumerate(rig.schedules) if s.paused)
    schedules = rig.schedules[first : first + len(paused)]
    assert [s.paused for s in schedules] == paused
    assert [s.preempted for s in schedules] == [()] * (len(paused) - 1) + [(1,)]
    assert schedules[-1].resumed == (0,)


def test_the_version_of_a_plan_is_that_of_its_schedule() -> None:
    rig = Rig(Sizes(depth=2), version=4)
    rig.add(prompt(4), Sample())
    rig.schedule()
    rig.version = 5
    rig.schedule()
    rig.run()
    rig.run()
    assert [rig.commit().weights_version, rig.commit().weights_version] == [4, 5]
    rig.drain()


def test_requests_in_flight_are_not_requeued() -> None:
    rig = Rig(Sizes(depth=2))
    rig.add(prompt(4), Sample())
    rig.schedule()
    with pytest.raises(AssertionError, match="in flight"):
        rig.scheduler.requeue_running()
