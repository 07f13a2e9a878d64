"""Scheduler in single situations, with pools of a few blocks. Rig checks each token."""

from __future__ import annotations

import pytest

from rollout import SamplingParams
from rollout.step.plan import NewRow
from rollout.version_spans import VersionSpans
from tests.scheduling.oracle import (
    Prefixes,
    Sample,
    Sizes,
    limit,
    prompt,
    run_alone,
)
from tests.scheduling.rig import Rig


def final_spans(rig: Rig, request_id: int) -> VersionSpans:
    """Step until the request is done; who wrote its KV."""
    while True:
        committed = rig.step()
        assert committed is not None
        for finished in committed.finished:
            if finished.request_id == request_id:
                return finished.kv_spans


# ---- order and limits


def test_higher_priority_is_admitted_first_then_arrival() -> None:
    rig = Rig(Sizes(num_rows=4, num_blocks=8))
    rig.add(prompt(2), Sample())
    rig.add(prompt(2), Sample())
    rig.add(prompt(2), Sample(), priority=1)
    rig.step()
    assert rig.schedules[0].admitted == (2, 0, 1)
    rig.drain()


def test_the_queue_is_not_overtaken_by_a_shorter_prompt() -> None:
    rig = Rig(Sizes(max_tokens=8, chunked=False))
    for length in (4, 6, 1):
        rig.add(prompt(length), Sample())
    rig.step()
    assert rig.schedules[0].admitted == (0,)
    rig.drain()


def test_a_long_prompt_shares_steps_with_decode_rows() -> None:
    rig = Rig(Sizes(max_tokens=4))
    rig.add(prompt(2), Sample(num_new=9))
    rig.step()
    rig.add(prompt(8), Sample())
    rig.step()
    plan = rig.plans[1]
    assert plan.num_decode_rows == 1
    assert plan.query_lens.tolist() == [1, 3]
    rig.drain()


def test_a_request_that_exactly_fits_the_pool_completes() -> None:
    rig = Rig(Sizes(num_blocks=3, block_size=4))
    rig.add(prompt(5), Sample(num_new=8))
    rig.drain()
    assert rig.plans[-1].context_lens.tolist() == [12]
    assert rig.known[0].finish_reason == "length"


def test_one_token_is_asked_for_and_no_second_step_runs() -> None:
    rig = Rig(Sizes())
    rig.add(prompt(3), Sample(num_new=1))
    rig.drain()
    assert len(rig.plans) == 1


def test_the_newest_is_preempted_when_an_older_one_needs_a_block() -> None:
    rig = Rig(Sizes(num_blocks=6, block_size=2, num_rows=3))
    for _ in range(3):
        rig.add(prompt(3), Sample(num_new=4))
    rig.drain()
    assert not any(s.paused for s in rig.schedules)
    assert [s.preempted for s in rig.schedules if s.preempted] == [(2,)]


def test_with_a_buffer_for_them_requests_pause_until_the_oldest_needs_their_blocks() -> None:
    rig = Rig(Sizes(num_blocks=5, block_size=2, num_rows=3, max_paused_blocks=5))
    rig.add(prompt(3), Sample(num_new=6))
    rig.add(prompt(3), Sample(num_new=6))
    rig.drain()
    assert [s.paused for s in rig.schedules if s.paused] == [(1,)]
    assert [s.preempted for s in rig.schedules if s.preempted] == [(1,)]


def test_paused_requests_beyond_their_buffer_are_preempted_at_once() -> None:
    rig = Rig(Sizes(num_blocks=4, block_size=2, num_rows=3, max_paused_blocks=1))
    rig.add(prompt(3), Sample(num_new=4))
    rig.add(prompt(3), Sample(num_new=4))
    rig.drain()
    assert not any(s.resumed for s in rig.schedules)
    assert [s.preempted for s in rig.schedules if s.preempted] == [(1,)]


def test_a_prompt_begun_in_parts_goes_on_beside_decode_rows_without_chunked_prefill() -> None:
    rig = Rig(Sizes(max_tokens=4, chunked=False))
    rig.add(prompt(4), Sample(num_new=9))
    for _ in range(3):
        rig.step()
    rig.requeue_running()  # 7 tokens to prefill: no step could hold them
    rig.add(prompt(1), Sample(num_new=20), priority=1)
    for _ in range(3):
        rig.step()
    assert len(rig.known[0].generated) == 4
    rig.drain()


# ---- prompt scores


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 5, 8, 16])
def test_scores_of_a_chunked_prompt_are_those_of_a_whole_one(max_tokens: int) -> None:
    rig = Rig(Sizes(max_tokens=max_tokens, num_rows=1))
    rig.add(prompt(9), Sample(wants_scores=True))
    rig.drain()
    assert len(rig.known[0].scores) == 8


def test_a_prompt_of_one_token_has_nothing_to_score() -> None:
    rig = Rig(Sizes())
    rig.add(prompt(1), Sample(wants_scores=True))
    committed = rig.step()
    assert committed is not None
    assert committed.scored == []
    rig.drain()


def test_a_prompt_begun_again_is_scored_again_from_the_start() -> None:
    rig = Rig(Sizes(max_tokens=4))
    rig.add(prompt(9), Sample(wants_scores=True))
    rig.step()
    rig.requeue_running()
    rig.drain()
    assert len(rig.known[0].scores) == 8


def test_a_prompt_is_not_scored_again_once_a_token_was_generated() -> None:
    rig = Rig(Sizes())
    rig.add(prompt(5), Sample(wants_scores=True))
    rig.step()
    rig.requeue_running()
    rig.step()
    assert len(rig.plans[1].score_sources) == 0
    rig.drain()


# ---- versions


@pytest.mark.parametrize(
    ("recomputes", "runs"), [(False, [(10, 0), (3, 1), (2, 2)]), (True, [(15, 2)])]
)
def test_kv_versions_are_those_of_the_reference_numbers(
    recomputes: bool, runs: list[tuple[int, int]]
) -> None:
    rig = Rig(Sizes())
    rig.add(prompt(8), Sample(num_new=8))
    for version in (1, 2):
        for _ in range(3):
            rig.step()
        rig.set_version(version)
        if recomputes:
            rig.requeue_running()
    assert final_spans(rig, 0) == VersionSpans(runs)


def test_requeue_older_than_requeues_only_requests_with_older_kv() -> None:
    rig = Rig(Sizes())
    rig.add(prompt(3), Sample())
    rig.step()
    rig.set_version(1)
    rig.add(prompt(3), Sample())
    rig.step()
    rig.requeue_older_than(1)
    assert rig.in_phase("waiting") == [0]
    assert rig.in_phase("running") == [1]
    rig.drain()


# ---- failures and endings


@pytest.mark.parametrize("after_writes", [False, True])
def test_requests_of_a_failed_step_start_again_with_all_their_tokens(after_writes: bool) -> None:
    rig = Rig(Sizes(num_blocks=12))
    rig.add(prompt(6), Sample(seed=1), Sample(seed=2))
    rig.fail_step(after_writes=after_writes)
    rig.step()
    rig.step()
    rig.fail_step(after_writes=after_writes)
    assert rig.in_phase("waiting") == [0, 1]
    rig.drain()


@pytest.mark.parametrize("scarce", [{"num_blocks": 3}, {"num_rows": 1}])
def test_schedule_alone_preempts_others_only_as_needed(
    scarce: dict[str, int],
) -> None:
    rig = Rig(Sizes(**({"num_blocks": 12, "block_size": 4} | scarce)))
    rig.add(prompt(6), Sample(seed=1, num_new=4))
    rig.step()
    rig.add(prompt(7), Sample(seed=2, num_new=4), Sample(seed=3, num_new=4))
    assert rig.step_alone(0).preempted == ()
    first, second = rig.step_alone(1), rig.step_alone(1)
    assert (first.admitted, first.preempted) == ((1,), (0,))
    assert (second.admitted, second.preempted) == ((), ())
    assert rig.in_phase("waiting") == [0, 2]
    rig.drain()


def test_logits_that_are_not_finite_end_their_request_alone() -> None:
    tokens, _ = run_alone(prompt(4), Sample(num_new=6, seed=1), limit(10))
    rig = Rig(Sizes(poison=frozenset({tokens[2]})))
    rig.add(prompt(4), Sample(num_new=6, seed=1))
    rig.add(prompt(3), Sample(num_new=2, seed=2))
    rig.drain()
    assert rig.known[0].finish_reason == "error"
    assert rig.known[1].finish_reason == "length"


@pytest.mark.parametrize("num_steps", [0, 1, 2])
def test_abort_frees_everything_in_any_phase(num_steps: int) -> None:
    rig = Rig(Sizes(max_tokens=4))
    rig.add(prompt(6), Sample())
    for _ in range(num_steps):
        rig.step()
    rig.abort(0)
    assert rig.kv_cache_manager.used_blocks() == []
    assert rig.schedule() is None


def test_sampling_parameters_are_sent_once_with_the_first_token() -> None:
    rig = Rig(Sizes(max_tokens=4))
    rig.add(prompt(6), Sample(seed=9))
    rig.drain()
    new_row = NewRow(row=1, sampling_params=SamplingParams(), seed=9, num_prompt=6)
    assert [plan.new_rows for plan in rig.plans[:3]] == [(), (new_row,), ()]


# ---- who waits for whom


def steps_until_prefilled(rig: Rig, request_id: int) -> int:
    """Steps until the request has its first token."""
    for number in range(1, 1000):
        rig.step()
        if rig.known[request_id].generated:
            return number
    raise AssertionError("it waits for ever")


@pytest.mark.parametrize("chunked", [True, False])
def test_a_long_prompt_does_not_wait_until_rows_that_decode_have_ended(chunked: bool) -> None:
    rig = Rig(Sizes(num_blocks=600, num_rows=16, max_tokens=32, chunked=chunked))
    for _ in range(8):
        rig.add(prompt(2), Sample(num_new=200))
    rig.step()
    long = rig.add(prompt(32), Sample(num_new=2))[0]
    behind = rig.add(prompt(2), Sample(num_new=2))[0]
    assert steps_until_prefilled(rig, long) <= 5
    assert steps_until_prefilled(rig, behind) <= 5
    assert [len(rig.known[i].generated) for i in range(8)] != [1] * 8


def test_long_prompts_without_chunked_prefill_leave_every_other_step_to_rows_that_decode() -> None:
    rig = Rig(Sizes(num_blocks=600, num_rows=16, max_tokens=32, chunked=False))
    rig.add(prompt(2), Sample(num_new=100))
    rig.step()
    for _ in range(10):
        rig.add(prompt(32), Sample(num_new=1))
    for _ in range(20):
        rig.step()
    assert len(rig.known[0].generated) == 11
    assert all(rig.known[i].phase == "done" for i in range(1, 11))


def test_a_stream_of_higher_priorities_starves_nobody() -> None:
    rig = Rig(Sizes(num_rows=1, num_blocks=8))
    low = [rig.add(prompt(2), Sample(num_new=2), priority=-9)[0] for _ in range(3)]
    for _ in range(150):
        rig.add(prompt(2), Sample(num_new=2), priority=5)
        rig.step()
    assert [rig.known[i].phase for i in low] == ["done"] * 3
    rig.drain()


def test_higher_priorities_are_fifteen_of_sixteen_admissions_beside_a_long_queue() -> None:
    rig = Rig(Sizes(num_rows=1, num_blocks=8))
    low = [rig.add(prompt(2), Sample(num_new=1))[0] for _ in range(20)]
    high = [rig.add(prompt(2), Sample(num_new=1), priority=1)[0] for _ in range(60)]
    for _ in range(32):
        rig.step()
    assert sum(rig.known[i].phase == "done" for i in high) == 30
    assert [rig.known[i].phase for i in low[:3]] == ["done", "done", "waiting"]


def test_a_prompt_without_room_is_tried_again_after_a_request_ends() -> None:
    rig = Rig(Sizes(num_blocks=8, block_size=4, num_rows=4))
    rig.add(prompt(4), Sample(num_new=6))
    rig.step()
    blocked = rig.add(prompt(28), Sample(num_new=2))[0]
    rig.drain()
    first = next(n for n, s in enumerate(rig.schedules) if blocked in s.admitted)
    assert rig.schedules[first - 1].plan is not None
    assert first == 6


def test_a_request_without_room_evicts_no_cached_block() -> None:
    rig = Rig(
        Sizes(num_blocks=24, num_rows=8, max_tokens=64, conservativeness=1.0, prefixes=Prefixes())
    )
    shared = prompt(24)
    rig.add(shared, Sample(num_new=2))
    while rig.unfinished():
        rig.step()
    rig.add([0, *prompt(3)], Sample(num_new=60, seed=2))
    rig.step()
    num_cached = rig.scheduler.counts().num_blocks_indexed
    blocked = rig.add(list(reversed(prompt(72))), Sample(num_new=20, seed=3))[0]
    rig.step()
    assert rig.in_phase("waiting") == [blocked]
    assert rig.scheduler.counts().num_blocks_indexed == num_cached
    rig.drain()
