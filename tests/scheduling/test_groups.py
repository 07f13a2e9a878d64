"""Groups: samples of one prompt share its prefill, whatever happens to the first sample."""

from __future__ import annotations

from rollout.step.plan import StepPlan
from rollout.version_spans import VersionSpans
from tests.scheduling.oracle import Sample, Sizes, prompt
from tests.scheduling.rig import Rig


def num_prefill_tokens(plans: list[StepPlan]) -> int:
    return sum(len(plan.prefill_token_ids) for plan in plans)


def test_the_prompt_of_a_group_is_prefilled_once_and_its_last_block_copied_on_write() -> None:
    rig = Rig(Sizes(num_blocks=12, block_size=4, num_rows=4, max_tokens=16))
    rig.add(prompt(6), *(Sample(seed=seed) for seed in range(4)))
    rig.drain()
    assert num_prefill_tokens(rig.plans) == 6
    assert rig.plans[0].sample_sources.tolist() == [5, 5, 5, 5]
    assert [len(plan.copy_sources) for plan in rig.plans[:3]] == [0, 3, 0]


def test_a_group_whose_prompt_fills_its_blocks_copies_nothing() -> None:
    rig = Rig(Sizes(num_blocks=12, block_size=4, num_rows=4, max_tokens=16))
    rig.add(prompt(8), *(Sample(seed=seed) for seed in range(4)))
    rig.drain()
    assert num_prefill_tokens(rig.plans) == 8
    assert not any(len(plan.copy_sources) for plan in rig.plans)


def test_siblings_that_find_no_row_prefill_the_prompt_again() -> None:
    rig = Rig(Sizes(num_blocks=12, num_rows=2))
    rig.add(prompt(6), *(Sample(seed=seed) for seed in range(4)))
    rig.drain()
    assert [s.num_forked for s in rig.schedules if s.num_forked] == [1, 1]
    assert num_prefill_tokens(rig.plans) == 12


def test_a_sibling_that_wants_its_prompt_scored_prefills_it_itself() -> None:
    rig = Rig(Sizes(num_blocks=12))
    rig.add(prompt(6), Sample(), Sample(wants_scores=True), Sample())
    rig.drain()
    assert num_prefill_tokens(rig.plans) == 12
    assert len(rig.known[1].scores) == 5


def test_siblings_wait_for_a_leader_in_the_middle_of_its_prompt() -> None:
    rig = Rig(Sizes(num_blocks=12, max_tokens=4))
    rig.add(prompt(6), Sample(seed=1), Sample(seed=2))
    rig.step()
    assert rig.in_phase("waiting") == [1]
    rig.drain()
    assert num_prefill_tokens(rig.plans) == 6


def test_a_sibling_prefills_if_the_leader_is_aborted_within_its_prompt() -> None:
    rig = Rig(Sizes(num_blocks=12, max_tokens=4))
    rig.add(prompt(6), *(Sample(seed=seed) for seed in range(3)))
    rig.step()
    rig.abort(0)
    rig.drain()
    assert num_prefill_tokens(rig.plans) == 4 + 6


def test_a_leader_preempted_in_the_middle_of_its_prompt_forks_later() -> None:
    rig = Rig(Sizes(num_blocks=4, block_size=2, max_tokens=2))
    rig.add(prompt(2), Sample(num_new=7))
    rig.add(prompt(4), Sample(num_new=1), Sample(num_new=1, seed=1))
    for _ in range(4):
        rig.step()
    assert rig.schedules[3].preempted == (1,)
    assert rig.known[1].generated == []
    rig.drain()
    assert sum(s.num_forked for s in rig.schedules) == 1


def test_children_of_a_leader_aborted_in_flight_have_its_kv_versions() -> None:
    rig = Rig(Sizes(num_blocks=12, depth=2), version=3)
    rig.add(prompt(6), Sample(seed=1), Sample(seed=2))
    rig.schedule()
    rig.abort(0)
    rig.run()
    committed = rig.commit()
    assert committed.request_ids == [1]
    assert rig.scheduler.kv_spans(1) == VersionSpans([(6, 3)])
    rig.drain()


def test_children_inherit_the_versions_of_a_prompt_prefilled_across_an_update() -> None:
    rig = Rig(Sizes(num_blocks=12, max_tokens=4))
    rig.add(prompt(6), Sample(seed=1), Sample(seed=2))
    rig.step()
    rig.set_version(1)
    committed = rig.step()
    assert committed is not None
    for prefilled in committed.prefilled:
        assert prefilled.kv_spans == VersionSpans([(4, 0), (2, 1)])
    assert rig.scheduler.kv_spans(1) == VersionSpans([(4, 0), (2, 1)])
    rig.drain()


def test_a_step_that_fails_before_its_copies_loses_no_kv_of_rows_it_did_not_run() -> None:
    rig = Rig(Sizes(num_blocks=40, num_rows=8, chunked=False))
    rig.add(prompt(6), *(Sample(num_new=8, seed=seed) for seed in range(3)))
    rig.step()
    rig.add(prompt(16), Sample(num_new=3))
    plan = rig.schedule()
    assert plan is not None
    assert plan.num_decode_rows == 0
    assert len(plan.copy_sources) == 2
    rig.fail_step(after_writes=False)
    rig.drain()


def test_a_leader_prefilled_alone_does_not_keep_others_waiting() -> None:
    rig = Rig(Sizes(num_blocks=200, num_rows=8, max_tokens=8))
    rig.add(prompt(12), *(Sample(num_new=60, seed=seed) for seed in range(3)))
    behind_them = rig.add(prompt(3), Sample(num_new=4))[0]
    rig.step()
    for _ in range(2):
        rig.fail_step(after_writes=False)
    for _ in range(3):
        rig.step_alone(0)
    for _ in range(4):
        rig.step()
    assert rig.in_phase("waiting") == []
    assert rig.known[behind_them].generated
    rig.drain()
