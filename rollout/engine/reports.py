"""What suspend, resume and stats() report, and the counters behind it. Times are in seconds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields

from rollout.engine.state import EngineState
from rollout.runner.weight_update import WeightUpdateReport
from rollout.scheduling.output import SchedulerCounts, SchedulerOutput
from rollout.step.plan import StepPlan
from rollout.telemetry import MetricsWriter, StepStats


@dataclass(frozen=True, slots=True, kw_only=True)
class SuspendReport:
    """What a suspend did.

    mode: the KV mode that was used. bytes_released: device memory given back by this call.
    bytes_kept: device memory still reserved. bytes_on_host: the copies that wait for resume.
    *_by_owner: the same bytes for "kv_cache" and "weights". num_requests_requeued: requests that
    lost their KV by this call.
    """

    mode: str
    seconds: float = 0.0
    bytes_released: int = 0
    bytes_kept: int = 0
    bytes_on_host: int = 0
    released_by_owner: Mapping[str, int] = field(default_factory=dict)
    kept_by_owner: Mapping[str, int] = field(default_factory=dict)
    num_requests_requeued: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumeReport:
    """What a resume did.

    bytes_restored: device memory that was copied to or made usable again. graphs_recaptured: the
    captured steps that were lost; later steps capture them again. num_requests_recomputed: the
    requests that later steps prefill again.
    """

    mode: str
    seconds: float = 0.0
    bytes_restored: int = 0
    restored_by_owner: Mapping[str, int] = field(default_factory=dict)
    graphs_recaptured: int = 0
    num_requests_recomputed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryStatus:
    """Where the memory of an engine is now, for the owners "kv_cache" and "weights".

    resident_bytes: device memory by owner. bytes_on_host: host copies by owner. kv_mode: the mode
    under which the KV was last released. released: owners whose memory was released. to_restore:
    owners that resume restores, also those of a suspend that failed midway. has_weights: False
    while the weights are discarded or mixed, until a full update is committed.
    """

    resident_bytes: Mapping[str, int]
    bytes_on_host: Mapping[str, int]
    kv_mode: str
    released: tuple[str, ...]
    to_restore: tuple[str, ...]
    has_weights: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """A snapshot. Requests by phase and blocks are those of now, all else counts from the start."""

    state: EngineState
    weights_version: int
    num_waiting: int
    num_running: int
    num_paused: int
    num_blocks_used: int
    num_blocks_indexed: int
    num_blocks_total: int
    num_graph_captures: int  # 0 where steps run eagerly
    num_steps: int
    num_failed_steps: int  # forward passes that raised
    num_prefill_tokens: int
    num_decode_tokens: int
    num_sampled_tokens: int
    num_forked_requests: int
    num_prefix_hit_tokens: int
    num_finished: int
    num_failed: int
    num_pauses: int
    num_evictions: int
    num_recomputed_requests: int
    num_suspends: int
    num_weight_updates: int
    step_seconds: float
    suspend_seconds: float
    resume_seconds: float
    update_seconds: float
    suspended_bytes: int
    resumed_bytes: int

    def as_metrics(self, prefix: str = "engine/") -> dict[str, float]:
        """Return the numbers under flat names, as a MetricsWriter takes them."""
        values = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "state"}
        return {f"{prefix}{name}": value for name, value in values.items()}


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


class EngineCounters:
    """The only writer of an engine's counters. Reports and every `interval`-th step go to `writer`.

    An interval of 0 writes no metrics of steps.
    """

    def __init__(self, writer: MetricsWriter | None, interval: int) -> None:
        self._writer = writer
        self._interval = interval
        self._totals = _Totals()

    def add_schedule(self, schedule: SchedulerOutput) -> None:
        self._totals.num_pauses += len(schedule.paused)
        self._totals.num_evictions += len(schedule.preempted)
        self._totals.num_forked_requests += schedule.num_forked
        self._totals.num_prefix_hit_tokens += schedule.num_prefix_hit_tokens

    def add_step(self, plan: StepPlan, seconds: float, counts: SchedulerCounts) -> None:
        """Count a step, and write its StepStats if its turn has come."""
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

    def add_failed_step(self) -> None:
        self._totals.num_failed_steps += 1

    def add_ended(self, *, num_finished: int, num_failed: int) -> None:
        self._totals.num_finished += num_finished
        self._totals.num_failed += num_failed

    def add_recomputed(self, num_requests: int) -> None:
        self._totals.num_recomputed_requests += num_requests

    def add_suspend(self, report: SuspendReport) -> None:
        self._totals.num_suspends += 1
        self._totals.suspend_seconds += report.seconds
        self._totals.suspended_bytes += report.bytes_released
        self._totals.num_recomputed_requests += report.num_requests_requeued
        self._write({f"engine/suspend/{name}": value for name, value in _numbers(report)})

    def add_resume(self, report: ResumeReport) -> None:
        self._totals.resume_seconds += report.seconds
        self._totals.resumed_bytes += report.bytes_restored
        self._write({f"engine/resume/{name}": value for name, value in _numbers(report)})

    def add_update(self, report: WeightUpdateReport) -> None:
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
    """Yield the report's numbers by name; those by owner as `name/owner`."""
    for entry in fields(report):
        value = getattr(report, entry.name)
        if isinstance(value, Mapping):
            yield from ((f"{entry.name}/{owner}", number) for owner, number in value.items())
        elif not isinstance(value, str):
            yield entry.name, value
