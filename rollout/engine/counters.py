"""EngineCounters: an engine's totals since its start, and the metrics that it writes.

`rollout.engine.build` and `rollout_vllm.engine` create it. Step pipelines count steps,
OutputProcessor counts tokens and ended requests, and Engine counts suspends, resumes and weight
updates. `rollout.serve.metrics` reads the constants. EngineCounters calls the user's MetricsWriter.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping
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
from rollout.requests.record import DynamicInferenceRequestRecord
from rollout.telemetry import MetricsWriter, ObserverGuard, RankUse, SchedulerCounts, StepStats
from rollout.version_spans import VersionSpans

# Upper bounds of the buckets of latencies in seconds: 1, 2, 5, 10 ms, ... up to 5,000 s.
LATENCY_BOUNDS_S = tuple(digit * 10.0**power for power in range(-3, 4) for digit in (1, 2, 5))
FINISH_REASONS = ("stop", "length", "abort", "error")


@dataclass(slots=True)
class LatencyCounts:
    """Number of latencies in each bucket of LATENCY_BOUNDS_S, and the sum of all latencies in
    seconds. One further bucket at the end counts latencies above the largest bound."""

    counts: list[int] = field(default_factory=lambda: [0] * (len(LATENCY_BOUNDS_S) + 1))
    seconds: float = 0.0

    def add(self, seconds: float, times: int = 1) -> None:
        """Count a latency that occurred `times` times."""
        self.counts[bisect_left(LATENCY_BOUNDS_S, seconds)] += times
        self.seconds += seconds * times


@dataclass(slots=True)
class RequestTotals:
    """Totals of tokens, ends and latencies of requests. Only OutputProcessor writes them.

    num_begun_prompt_tokens: prompt tokens of the requests whose first token this engine sampled.
    finish_reasons: number of ended requests by FINISH_REASONS.
    first_token: seconds from a request's entry to its first token.
    token: seconds between two tokens of a request.
    request: seconds from entry to end, of requests that ended with "stop" or "length".
    """

    num_generated_tokens: int = 0
    num_begun_prompt_tokens: int = 0
    finish_reasons: dict[str, int] = field(default_factory=lambda: dict.fromkeys(FINISH_REASONS, 0))
    first_token: LatencyCounts = field(default_factory=LatencyCounts)
    token: LatencyCounts = field(default_factory=LatencyCounts)
    request: LatencyCounts = field(default_factory=LatencyCounts)

    def add_first_token(self, num_prompt_tokens: int, seconds: float) -> None:
        """Count the first token of a request, sampled `seconds` after the request's entry."""
        self.num_begun_prompt_tokens += num_prompt_tokens
        self.first_token.add(seconds)

    def add_end(self, finish_reason: str, seconds: float) -> None:
        """Count a request that ended `seconds` after its entry."""
        self.finish_reasons[finish_reason] += 1
        if finish_reason in ("stop", "length"):
            self.request.add(seconds)

    def as_stats(self) -> dict[str, Any]:
        """Return the totals as fields of EngineStats, by name."""
        latencies = {name: getattr(self, name) for name in ("first_token", "token", "request")}
        return {
            "num_generated_tokens": self.num_generated_tokens,
            "num_begun_prompt_tokens": self.num_begun_prompt_tokens,
            "finish_reasons": tuple(self.finish_reasons.values()),
            **{f"{name}_latency": tuple(own.counts) for name, own in latencies.items()},
            **{f"{name}_seconds": own.seconds for name, own in latencies.items()},
        }


@dataclass(slots=True)
class StepTotals:
    """Totals of all steps since the start. Only the step pipeline writes them."""

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


class StepTimes:
    """Duration of the longest step of each size, which bounds the duration of later steps. Step
    sizes are rounded down to powers of two. The bound assumes that twice the tokens take at most
    twice as long, because work per step, such as reading the weights, does not grow."""

    def __init__(self) -> None:
        self._slowest_s: dict[int, float] = {}  # by the largest power of two <= tokens of the step

    def add(self, num_tokens: int, seconds: float) -> None:
        """Record the duration of a step of at least one token."""
        size = 1 << (num_tokens.bit_length() - 1)
        if seconds > self._slowest_s.get(size, 0.0):
            self._slowest_s[size] = seconds

    def longest_s(self, max_tokens: int) -> float:
        """Return an upper bound for a step of `max_tokens`, in seconds; 0 if no step was
        recorded."""
        bounds = (
            seconds * -(-max_tokens // size) for size, seconds in list(self._slowest_s.items())
        )
        return min(bounds, default=0.0)


class EngineCounters:
    """Totals of an engine, and the metrics that it writes.

    `writer` receives the numbers of every report, and the metrics of every `interval`-th step. If
    `interval` is 0, it receives no step metrics. An exception of the writer is logged and ignored.
    Step pipelines change `steps` and `step_times`. OutputProcessor changes `requests`.
    """

    def __init__(self, *, writer: MetricsWriter | None, interval: int) -> None:
        self.steps, self.requests = StepTotals(), RequestTotals()
        self.step_times = StepTimes()
        self._interval = interval
        self._writer, self._guard = writer, ObserverGuard("the metrics_writer")
        self._others = _OtherTotals()

    def add_step(
        self,
        *,
        num_prefill_tokens: int,
        num_decode_tokens: int,
        num_sampled_tokens: int,
        seconds: float,
        weights_version: int,
        counts: Callable[[], SchedulerCounts],
    ) -> None:
        """Count a step, and write its metrics if its number is a multiple of `interval`. `counts`
        is called for the scheduler's counts after the step, only if metrics are written."""
        totals = self.steps
        totals.num_steps += 1
        totals.num_prefill_tokens += num_prefill_tokens
        totals.num_decode_tokens += num_decode_tokens
        totals.num_sampled_tokens += num_sampled_tokens
        totals.step_seconds += seconds
        if num_tokens := num_prefill_tokens + num_decode_tokens:
            self.step_times.add(num_tokens, seconds)
        if self._interval and totals.num_steps % self._interval == 0:
            stats = StepStats(
                step=totals.num_steps,
                seconds=seconds,
                num_prefill_tokens=num_prefill_tokens,
                num_decode_tokens=num_decode_tokens,
                num_sampled_tokens=num_sampled_tokens,
                weights_version=weights_version,
                **asdict(counts()),
            )
            self._write(stats.as_metrics())

    def add_ended(self, record: DynamicInferenceRequestRecord) -> None:
        """Count an ended request by its record."""
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
        self._write_report("suspend", report)

    def add_resume(self, report: ResumeReport) -> None:
        """Count a resume and write its report."""
        self._others.resume_seconds += report.seconds
        self._others.resumed_bytes += report.bytes_restored
        self._write_report("resume", report)

    def add_update(self, report: WeightUpdateReport) -> None:
        """Count a weight update and write its report."""
        self._others.num_weight_updates += 1
        self._others.update_seconds += report.seconds
        self._write_report("update", report)

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
        """Return the totals together with the given current values."""
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

    def _write_report(
        self, operation: str, report: SuspendReport | ResumeReport | WeightUpdateReport
    ) -> None:
        if self._writer is not None:
            self._write({f"engine/{operation}/{name}": value for name, value in _numbers(report)})

    def _write(self, metrics: dict[str, float]) -> None:
        if self._writer is not None:
            self._guard.call(self._writer.log, {"engine/step": self.steps.num_steps, **metrics})


def _add_ages(counts: list[int], spans: VersionSpans, version: int, start: int) -> None:
    """Count the positions of `spans` from `start` on by their age at `version`. The last entry of
    `counts` also counts all greater ages. O(runs)."""
    for run_start, end, made_under in spans:
        if end > start:
            age = min(version - made_under, len(counts) - 1)
            counts[age] += end - max(run_start, start)


def _numbers(
    report: SuspendReport | ResumeReport | WeightUpdateReport,
) -> Iterator[tuple[str, float]]:
    """Yield (name, number) for each field of the report that is not a text. A field with one number
    per resource yields names like "released_by_owner/weights"."""
    for entry in fields(report):
        value = getattr(report, entry.name)
        if isinstance(value, Mapping):
            yield from ((f"{entry.name}/{key}", number) for key, number in value.items())
        elif not isinstance(value, str):
            yield entry.name, value
