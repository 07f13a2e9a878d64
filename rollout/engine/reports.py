"""What suspend, resume and stats() report, and the counters behind it. Times are in seconds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from rollout.engine.request_totals import RequestTotals
from rollout.engine.state import EngineState
from rollout.engine.step_times import StepTimes
from rollout.requests.record import DynamicInferenceRequestRecord
from rollout.runner.weight_update import WeightUpdateReport
from rollout.step.plan import StepPlan
from rollout.telemetry import (
    RANK_FIELDS,
    MetricsWriter,
    ObserverGuard,
    RankUse,
    SchedulerCounts,
    StepStats,
    sum_of_ranks,
)
from rollout.version_spans import VersionSpans

STALENESS = ("policy_staleness", "kv_staleness")
LATENCIES = ("first_token_latency", "token_latency", "request_latency")
HISTOGRAMS = (*STALENESS, *LATENCIES, "finish_reasons")  # fields that are tuples of counts
# Fields that are the least of the engines' in the stats of a fleet; other numbers are sums.
LEAST_OF_FLEET = ("max_sequence_length", "block_size_tokens")
NUM_AGES = 9  # of a histogram of staleness: 0 to 7 versions, and older


@dataclass(frozen=True, slots=True, kw_only=True)
class SuspendReport:
    """What a suspend did.

    mode: the KV mode that was used. bytes_released: reserved memory given back by this call.
    resident_bytes_released: how much of it had taken memory; on a host, blocks that were never
    written to take none. bytes_kept: memory still reserved. bytes_on_host: the copies that wait for
    resume. *_by_owner: the same bytes for "kv_cache" and "weights". kept_beside: bytes of neither
    that stay: captured "graphs", their "inputs", "tables" and buffers of the model, the "rows" of
    requests. num_requests_requeued: requests that lost their KV by this call.
    """

    mode: str
    seconds: float = 0.0
    bytes_released: int = 0
    resident_bytes_released: int = 0
    bytes_kept: int = 0
    bytes_on_host: int = 0
    released_by_owner: Mapping[str, int] = field(default_factory=dict)
    kept_by_owner: Mapping[str, int] = field(default_factory=dict)
    kept_beside: Mapping[str, int] = field(default_factory=dict)
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

    resident_bytes: reserved memory by owner, written to or not. bytes_on_host: host copies by
    owner. kv_mode: the mode under which the KV was last released. released: owners whose memory was
    released. to_restore: owners that resume restores, also those of a suspend that failed midway.
    has_weights: False while the weights are discarded or mixed, until a full update is committed.
    lora_base_bytes: on the host, what adapted weights are without their adapter; suspends keep it.
    routing_bytes: on the host, the recorded experts of all KV entries; suspends keep it, too.
    """

    resident_bytes: Mapping[str, int]
    bytes_on_host: Mapping[str, int]
    kv_mode: str
    released: tuple[str, ...]
    to_restore: tuple[str, ...]
    has_weights: bool
    lora_base_bytes: int
    routing_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightChecksums:
    """Checksums of a page of the weights, 16 hex digits each, by Hugging Face name in sorted order.

    version: the weights' version. num_weights: the number of weights in all pages.
    """

    checksums: Mapping[str, str]
    num_weights: int
    version: int


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


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats(SchedulerCounts):
    """The state of an engine, its requests by phase and its blocks as of now, and totals since its
    start.

    num_prompt_tokens: of the requests that have ended. policy_staleness, kv_staleness: how many of
    their generated tokens were 0, 1, ... versions old when the request ended, by the version that
    sampled them, and by the one that wrote their KV; the last number counts all that were older.
    finish_reasons, *_latency, num_generated_tokens, num_begun_prompt_tokens: see RequestTotals;
    *_seconds beside a *_latency is the sum of all. ranks: what each process of the engine uses.
    """

    state: EngineState
    weights_version: int
    max_sequence_length: int  # of a fleet: the least of its engines
    block_size_tokens: int  # of a fleet: the least of its engines
    num_graph_captures: int  # 0 where steps run eagerly
    lora_base_bytes: int  # on the hosts of all ranks: adapted weights without their adapter
    routing_bytes: int  # on the host: the experts of all KV entries, if they are recorded
    num_steps: int
    num_failed_steps: int  # forward passes that raised
    num_prefill_tokens: int
    num_decode_tokens: int
    num_sampled_tokens: int
    num_forked_requests: int
    num_prefix_hit_tokens: int
    num_finished: int
    num_failed: int
    num_prompt_tokens: int
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
    policy_staleness: tuple[int, ...]
    kv_staleness: tuple[int, ...]
    num_generated_tokens: int
    num_begun_prompt_tokens: int
    finish_reasons: tuple[int, ...]
    first_token_latency: tuple[int, ...]
    first_token_seconds: float
    token_latency: tuple[int, ...]
    token_seconds: float
    request_latency: tuple[int, ...]
    request_seconds: float
    ranks: tuple[RankUse, ...] = field(compare=False)  # time and memory pass whatever is done

    def as_metrics(self, prefix: str = "engine/") -> dict[str, float]:
        """Return the numbers under flat names, as a MetricsWriter takes them: those of `ranks` as
        sums, and, where there are several, of each by its engine and rank."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        values |= {name: sum_of_ranks(self.ranks, name) for name in RANK_FIELDS}
        if len(self.ranks) > 1:
            for rank in self.ranks:
                values |= {f"rank_{rank.label}/{n}": getattr(rank, n) for n in RANK_FIELDS}
        return {f"{prefix}{n}": v for n, v in values.items() if isinstance(v, (int, float))}


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
