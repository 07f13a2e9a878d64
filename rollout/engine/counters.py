"""EngineTelemetry: counts what the engine does, and writes metrics at its interval."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields

from rollout.engine.reports import EngineStats, ResumeReport, SuspendReport
from rollout.engine.state import EngineState
from rollout.runner.weight_update import WeightUpdateReport
from rollout.scheduling.output import SchedulerCounts, SchedulerOutput
from rollout.step.plan import StepPlan
from rollout.telemetry import MetricsWriter, StepStats


@dataclass(slots=True)
class _Totals:
    num_steps: int = 0
    num_failed_steps: int = 0
    num_prefill_tokens: int = 0
    num_decode_tokens: int = 0
    num_sampled_tokens: int = 0
    num_forked_requests: int = 0
    num_prefix_hit_tokens: int = 0
    num_finished: int = 0
    num_failed: int = 0
    num_pauses: int = 0
    num_evictions: int = 0
    num_recomputed_requests: int = 0
    num_suspends: int = 0
    num_weight_updates: int = 0
    step_seconds: float = 0.0
    suspend_seconds: float = 0.0
    resume_seconds: float = 0.0
    update_seconds: float = 0.0
    suspended_bytes: int = 0
    resumed_bytes: int = 0


class EngineTelemetry:
    """The only writer of an engine's counters. `interval` 0 writes no per-step metrics."""

    def __init__(self, writer: MetricsWriter | None, interval: int) -> None:
        self._writer = writer
        self._interval = interval
        self._totals = _Totals()

    def note_schedule(self, schedule: SchedulerOutput) -> None:
        self._totals.num_pauses += len(schedule.paused)
        self._totals.num_evictions += len(schedule.preempted)
        self._totals.num_forked_requests += schedule.num_forked
        self._totals.num_prefix_hit_tokens += schedule.num_prefix_hit_tokens

    def note_step(self, plan: StepPlan, seconds: float, counts: SchedulerCounts) -> None:
        """A step ran; every `interval` steps its StepStats go to the writer."""
        totals = self._totals
        num_decode = plan.num_decode_rows
        num_prefill = plan.num_tokens - num_decode
        totals.num_steps += 1
        totals.num_prefill_tokens += num_prefill
        totals.num_decode_tokens += num_decode
        totals.num_sampled_tokens += len(plan.sample_rows)
        totals.step_seconds += seconds
        if self._interval and totals.num_steps % self._interval == 0:
            stats = StepStats(
                step=totals.num_steps,
                seconds=seconds,
                num_prefill_tokens=num_prefill,
                num_decode_tokens=num_decode,
                num_sampled_tokens=len(plan.sample_rows),
                weights_version=plan.weights_version,
                **asdict(counts),
            )
            self._write(stats.as_metrics())

    def note_failed_step(self) -> None:
        self._totals.num_failed_steps += 1

    def note_ended(self, *, num_finished: int = 0, num_failed: int = 0) -> None:
        self._totals.num_finished += num_finished
        self._totals.num_failed += num_failed

    def note_recomputed(self, num_requests: int) -> None:
        self._totals.num_recomputed_requests += num_requests

    def note_suspend(self, report: SuspendReport) -> None:
        self._totals.num_suspends += 1
        self._totals.suspend_seconds += report.seconds
        self._totals.suspended_bytes += report.bytes_released
        self._totals.num_recomputed_requests += report.num_requests_requeued
        self._write({f"engine/suspend/{name}": value for name, value in _numbers(report)})

    def note_resume(self, report: ResumeReport) -> None:
        self._totals.resume_seconds += report.seconds
        self._totals.resumed_bytes += report.bytes_restored
        self._write({f"engine/resume/{name}": value for name, value in _numbers(report)})

    def note_update(self, report: WeightUpdateReport) -> None:
        self._totals.num_weight_updates += 1
        self._totals.update_seconds += report.seconds
        self._write({f"engine/update/{name}": value for name, value in _numbers(report)})

    def stats(
        self,
        state: EngineState,
        weights_version: int,
        counts: SchedulerCounts,
        num_graph_captures: int,
    ) -> EngineStats:
        return EngineStats(
            state=state,
            weights_version=weights_version,
            num_graph_captures=num_graph_captures,
            **asdict(counts),
            **asdict(self._totals),
        )

    def _write(self, metrics: dict[str, float]) -> None:
        if self._writer is not None:
            self._writer.log({"engine/step": self._totals.num_steps, **metrics})


def _numbers(
    report: SuspendReport | ResumeReport | WeightUpdateReport,
) -> Iterator[tuple[str, float]]:
    """The report's numbers by name; those by owner get the owner's name behind a slash."""
    for field in fields(report):
        value = getattr(report, field.name)
        if isinstance(value, Mapping):
            yield from ((f"{field.name}/{owner}", number) for owner, number in value.items())
        elif not isinstance(value, str):
            yield field.name, value
