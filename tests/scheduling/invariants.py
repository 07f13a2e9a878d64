"""Invariants of a scheduler that Rig checks after every step."""

from __future__ import annotations

from dataclasses import dataclass

from rollout.scheduling.output import SchedulerOutput
from rollout.scheduling.scheduler import Scheduler
from rollout.scheduling.sequence import Phase
from tests.fakes import FakeWorker
from tests.scheduling.oracle import Known, Sizes, in_phase


@dataclass(frozen=True, slots=True)
class Seen:
    """A sequence with a row, before a schedule."""

    request_id: int
    order: tuple[int, int]
    is_in_flight: bool
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Before:
    """The sequences with rows before a schedule, oldest first, and the plans in flight."""

    active: list[Seen]
    num_plans: int


def observe(scheduler: Scheduler) -> Before:
    active = [
        Seen(s.request_id, s.order, s.num_in_flight > 0, tuple(s.table.blocks))
        for s in scheduler.running
    ]
    return Before(active, len(scheduler.in_flight))


def check_blocks(scheduler: Scheduler) -> None:
    """Check that queue, rows, blocks and counts agree."""
    assert scheduler.violations() == []
    kv = scheduler.kv_cache_manager
    assert len(kv.used_blocks()) == scheduler.counts().num_blocks_used
    assert scheduler.counts().num_blocks_indexed == kv.prefix_index.num_entries


def orders(scheduler: Scheduler) -> dict[int, tuple[int, int]]:
    """Return the order of each request, which only a promotion changes."""
    return {request_id: s.order for request_id, s in scheduler.requests.items()}


def check_schedule(
    scheduler: Scheduler,
    sizes: Sizes,
    known: dict[int, Known],
    before: Before,
    schedule: SchedulerOutput,
    promoted: set[int],
) -> None:
    """Check limits, order, and which requests are paused, resumed, preempted, admitted."""
    orders = [s.order for s in scheduler.running]
    assert orders == sorted(orders)
    assert all(s.num_tokens <= s.stop_rule.max_length for s in scheduler.running)
    counts = scheduler.counts()
    assert counts.num_waiting == len(in_phase(known, "waiting"))
    assert counts.num_running == len(in_phase(known, "running"))
    assert counts.num_paused == len(in_phase(known, "paused"))
    if schedule.plan is not None:
        assert 0 < schedule.plan.num_tokens <= sizes.max_tokens
        assert len(schedule.plan.sample_rows) <= sizes.num_rows
    elif not before.num_plans:
        assert counts.num_waiting + counts.num_running + counts.num_paused == 0
    _check_oldest(scheduler, sizes, before, schedule)
    _check_paused(scheduler, sizes, before, schedule)
    _check_resumed(scheduler, before, schedule)
    _check_admitted(scheduler, known, schedule, promoted)
    _check_hits(scheduler, sizes, known, schedule)


def _check_oldest(
    scheduler: Scheduler, sizes: Sizes, before: Before, schedule: SchedulerOutput
) -> None:
    """The oldest is never preempted. It runs unless plans in flight hold the blocks it needs."""
    if not before.active:
        return
    first, *others = before.active
    assert first.request_id not in schedule.preempted
    oldest = next(s for s in scheduler.running if s.request_id == first.request_id)
    if not before.num_plans:
        assert schedule.plan is not None
        num_decodes = schedule.plan.num_decode_rows
        is_prefill_alone = not sizes.chunked and schedule.admitted and not num_decodes
        assert oldest.table.row in schedule.plan.rows or is_prefill_alone
    elif oldest.phase is Phase.PAUSED:
        assert {s.request_id for s in others if not s.is_in_flight} <= set(schedule.preempted)


def _check_paused(
    scheduler: Scheduler, sizes: Sizes, before: Before, schedule: SchedulerOutput
) -> None:
    """Paused requests fit their buffer, unless none may be preempted, newest first."""
    orders = {s.request_id: s.order for s in before.active}
    assert not any(s.is_in_flight for s in before.active if s.request_id in schedule.preempted)
    paused = [s for s in scheduler.running if s.phase is Phase.PAUSED]
    oldest = next(iter(scheduler.running), None)
    preemptable = [s for s in paused if not s.num_in_flight and s is not oldest]
    assert not preemptable or sum(len(s.table.blocks) for s in paused) <= sizes.max_paused_blocks
    for request_id in schedule.preempted:
        assert all(s.order < orders[request_id] for s in preemptable)


def _check_resumed(scheduler: Scheduler, before: Before, schedule: SchedulerOutput) -> None:
    """No request takes a block while an older one waits for a block."""
    tables = {s.request_id: list(s.blocks) for s in before.active}
    paused = [s.order for s in scheduler.running if s.phase is Phase.PAUSED]
    for sequence in scheduler.running:
        if sequence.request_id in tables and tables[sequence.request_id] != sequence.table.blocks:
            assert not paused or sequence.order < min(paused)


def _check_admitted(
    scheduler: Scheduler, known: dict[int, Known], schedule: SchedulerOutput, promoted: set[int]
) -> None:
    """Requests are admitted in order, except forks, and none while others lack blocks."""
    if schedule.plan is None:
        assert not schedule.admitted
        return
    rows = {s.request_id: s.table.row for s in scheduler.running}
    computing = [i for i in schedule.admitted if rows[i] in schedule.plan.rows]
    assert len(schedule.admitted) - len(computing) == schedule.num_forked
    if computing:
        assert not schedule.preempted
        assert not in_phase(known, "paused")
        newest = max((known[i].order for i in computing if i not in promoted), default=(-99, 0))
        assert all(known[i].order > newest for i in in_phase(known, "waiting") if i not in promoted)


def _check_hits(
    scheduler: Scheduler, sizes: Sizes, known: dict[int, Known], schedule: SchedulerOutput
) -> None:
    """Shared prefixes have legal versions and leave out the last token.

    `check_contents` compares the contents of the blocks.
    """
    children = {id(child) for step in scheduler.in_flight for _, child in step.forks}
    num_hits = 0
    for sequence in scheduler.running:
        if sequence.request_id not in schedule.admitted or id(sequence) in children:
            continue
        versions, each = sequence.kv_spans.to_array().tolist(), known[sequence.request_id]
        num_hits += len(versions)
        assert len(versions) % sizes.block_size == 0
        assert len(versions) < len(each.prompt) + len(each.generated)
        if not versions:
            continue
        assert sizes.prefixes is not None
        assert schedule.plan is not None
        assert each.generated or not each.sample.wants_scores
        now = schedule.plan.weights_version
        if not sizes.prefixes.reuse_across_versions:
            assert set(versions) == {now}, "older context is served as new"
        if sizes.prefixes.max_age is not None:
            assert min(versions) >= now - sizes.prefixes.max_age
    assert schedule.num_prefix_hit_tokens == num_hits


def check_contents(scheduler: Scheduler, worker: FakeWorker) -> None:
    """Check that the blocks hold the KV of their sequences. No plan may wait for the worker."""
    for sequence in scheduler.running:
        if not sequence.num_computed:
            continue
        worker.check_row(sequence.table.row)
        versions = worker.versions(sequence.table.row)
        spans = scheduler.kv_spans(sequence.request_id)
        assert spans.to_array().tolist() == versions[: len(spans)]
        if not sequence.num_in_flight:
            assert len(spans) == len(versions) == sequence.num_computed
