"""EngineCounters: totals of an engine since its start, and the metrics written from them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from rollout.control.reports import (
    NUM_AGES,
    STALENESS,
    EngineStats,
    ResumeReport,
    SuspendReport,
    WeightUpdateReport,
)
from rollout.control.state import EngineState
from rollout.engine.request_totals import RequestTotals
from rollout.engine.step_times import StepTimes
from rollout.requests.record import DynamicInferenceRequestRecord
from rollout.step.plan import StepPlan
from rollout.telemetry import MetricsWriter, ObserverGuard, RankUse, SchedulerCounts, StepStats
from rollout.version_spans import VersionSpans


@dataclass(slots=True)
class StepTotals:
    """What all steps since the start have done. Only StepPipeline writes it."""

    num_steps: int = 0
    num_failed_steps: int = 0  # forward passes that raised
    num_prefill_tokens: int = 0
    num_decode_tokens: int = 0
    num_sampled_tokens: int = 0
    num_forked_requests: int = 0
    num_prefix_hit_tokens: int = 0
    num_pauses: int = 0
    num_evictions: int = 0
    step_seconds: float = 0.0


@dataclass(slots=True)
class _OtherTotals:
    """What all else since the start has done: ends of requests, and commands."""

    num_finished: int = 0
    num_failed: int = 0
    num_prompt_tokens: int = 0
    num_recomputed_requests: int = 0
    num_suspends: int = 0
    num_weight_updates: int = 0
    suspend_seconds: float = 0.0
    resume_seconds: float = 0.0
    update_seconds: float = 0.0
    suspended_bytes: int = 0
    resumed_bytes: int = 0
    policy_staleness: list[int] = field(default_factory=lambda: [0] * NUM_AGES)
    kv_staleness: list[int] = field(default_factory=lambda: [0] * NUM_AGES)


class EngineCounters:
    """An engine's totals. Every report, and every `interval`-th step, also goes to `writer`.

    An interval of 0 writes no metrics of steps. A writer that raises is logged: what it is to write
    has been done. `steps` and `step_times` are what StepPipeline writes, `requests` what
    OutputProcessor writes.
    """

    def __init__(self, *, writer: MetricsWriter | None, interval: int) -> None:
        self.steps, self.requests = StepTotals(), RequestTotals()
        self.step_times = StepTimes()
        self.interval = interval
        self._writer, self._guard = writer, ObserverGuard("the metrics_writer")
        self._others = _OtherTotals()

    def write_step(self, plan: StepPlan, seconds: float, counts: SchedulerCounts) -> None:
        """Write the metrics of the step that `steps` has counted last."""
        stats = StepStats(
            step=self.steps.num_steps,
            seconds=seconds,
            num_prefill_tokens=len(plan.prefill_token_ids),
            num_decode_tokens=plan.num_decode_rows,
            num_sampled_tokens=len(plan.sample_rows),
            weights_version=plan.weights_version,
            **asdict(counts),
        )
        self._write(stats.as_metrics())

    def add_ended(self, record: DynamicInferenceRequestRecord) -> None:
        """Count a request that is handed out."""
        last, totals, num_prompt = record.current, self._others, len(record[0].prompt_tokens)
        totals.num_failed += last.failed()
        totals.num_finished += not last.failed()
        totals.num_prompt_tokens += num_prompt
        if last.completed_at_version is not None:
            version = last.completed_at_version
            _add_ages(totals.policy_staleness, last.policy_spans, version, num_prompt)
            _add_ages(totals.kv_staleness, last.kv_spans, version, num_prompt)

    def add_recomputed(self, num_requests: int) -> None:
        """Count requests that are prefilled again because their KV is too old."""
        self._others.num_recomputed_requests += num_requests

    def add_suspend(self, report: SuspendReport) -> None:
        """Count a suspend and write its report."""
        self._others.num_suspends += 1
        self._others.suspend_seconds += report.seconds
        self._others.suspended_bytes += report.bytes_released
        self._others.num_recomputed_requests += report.num_requests_requeued
        self._write({f"engine/suspend/{name}": value for name, value in _numbers(report)})

    def add_resume(self, report: ResumeReport) -> None:
        """Count a resume and write its report."""
        self._others.resume_seconds += report.seconds
        self._others.resumed_bytes += report.bytes_restored
        self._write({f"engine/resume/{name}": value for name, value in _numbers(report)})

    def add_update(self, report: WeightUpdateReport) -> None:
        """Count a weight update and write its report."""
        self._others.num_weight_updates += 1
        self._others.update_seconds += report.seconds
        self._write({f"engine/update/{name}": value for name, value in _numbers(report)})

    def stats(
        self,
        state: EngineState,
        weights_version: int,
        counts: SchedulerCounts,
        num_graph_captures: int,
        max_sequence_length: int,
        block_size_tokens: int,
        ranks: tuple[RankUse, ...],
        routing_bytes: int,
    ) -> EngineStats:
        """Return the totals, together with what the engine knows of the present."""
        others: dict[str, Any] = asdict(self._others)
        for name in STALENESS:
            others[name] = tuple(others[name])
        return EngineStats(
            state=state,
            weights_version=weights_version,
            num_graph_captures=num_graph_captures,
            max_sequence_length=max_sequence_length,
            block_size_tokens=block_size_tokens,
            lora_base_bytes=sum(rank.lora_base_bytes for rank in ranks),
            routing_bytes=routing_bytes,
            ranks=ranks,
            **asdict(counts),
            **asdict(self.steps),
            **self.requests.as_stats(),
            **others,
        )

    def _write(self, metrics: dict[str, float]) -> None:
        if self._writer is not None:
            self._guard.call(self._writer.log, {"engine/step": self.steps.num_steps, **metrics})


def _add_ages(counts: list[int], spans: VersionSpans, version: int, start: int) -> None:
    """Count the entries from `start` on by how much older than `version` they are. O(runs)."""
    for run_start, end, made_under in spans:
        if end > start:
            age = min(version - made_under, len(counts) - 1)
            counts[age] += end - max(run_start, start)


def _numbers(
    report: SuspendReport | ResumeReport | WeightUpdateReport,
) -> Iterator[tuple[str, float]]:
    """Yield the report's numbers by name; those by owner as `name/owner`."""
    for entry in fields(report):
        value = getattr(report, entry.name)
        if isinstance(value, Mapping):
            yield from ((f"{entry.name}/{owner}", number) for owner, number in value.items())
        elif not isinstance(value, str):
            yield entry.name, value
