"""trace_decisions: an engine's scheduling decisions by request, not by block and row."""

from __future__ import annotations

from dataclasses import dataclass

from rollout.scheduling.output import SchedulerOutput
from rollout.scheduling.sequence import Phase
from tests.inspected_engine import InspectedEngine


@dataclass(frozen=True, slots=True)
class Chunk:
    """Positions [start, end) of a request that a step computes."""

    request_id: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Decision:
    """One call of schedule(). `tables`: the blocks of each request with blocks after it."""

    schedule: SchedulerOutput
    version: int
    chunks: tuple[Chunk, ...]
    forks: tuple[tuple[int, int], ...]  # (parent, child)
    sampled: tuple[int, ...]
    tables: dict[int, tuple[int, ...]]
    waiting: tuple[int, ...]
    paused: tuple[int, ...]
    orders: dict[int, tuple[int, int]]  # of all requests; that of one that waited longest changes
    is_alone: bool  # of a request that was in failed steps


def trace_decisions(engine: InspectedEngine) -> list[Decision]:
    """Return a list to which every later schedule of the engine appends its decision."""
    scheduler, decisions = engine.scheduler, []
    decide, decide_alone = scheduler.schedule, scheduler.schedule_alone

    def note(schedule: SchedulerOutput, weights_version: int, *, is_alone: bool) -> SchedulerOutput:
        step = scheduler.in_flight[-1] if schedule.plan is not None else None
        active = list(scheduler.running)
        decisions.append(
            Decision(
                schedule=schedule,
                version=weights_version,
                orders={i: s.order for i, s in scheduler.requests.items()},
                chunks=tuple(
                    Chunk(s.request_id, s.num_computed - count, s.num_computed)
                    for s, count in (step.computed if step else ())
                ),
                forks=tuple(
                    (parent.request_id, child.request_id)
                    for parent, child in (step.forks if step else ())
                ),
                sampled=tuple(s.request_id for s in (step.sampled if step else ())),
                tables={s.request_id: tuple(s.table.blocks) for s in active},
                waiting=tuple(s.request_id for s in scheduler.waiting),
                paused=tuple(s.request_id for s in active if s.phase is Phase.PAUSED),
                is_alone=is_alone,
            )
        )
        return schedule

    def traced(version: int) -> SchedulerOutput:
        return note(decide(version), version, is_alone=False)

    def traced_alone(request_id: int, version: int) -> SchedulerOutput:
        return note(decide_alone(request_id, version), version, is_alone=True)

    scheduler.schedule, scheduler.schedule_alone = traced, traced_alone
    return decisions
