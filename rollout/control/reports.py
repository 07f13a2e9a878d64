"""The reports that suspend, resume, weight updates and stats return. Times are in seconds.

Engines and the coordinator create reports, which are frozen. `rollout.control.commands` merges the
reports of a fleet's engines. Reports are read by `rollout.apis`, `rollout.serve` (metrics, health,
the page), `rollout.testing`, `trainer_hooks` (phase, time account, charts, dashboard, weight sync)
and users.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypeVar

from rollout.control.state import EngineState
from rollout.telemetry import RANK_FIELDS, RankUse, SchedulerCounts, sum_of_ranks

STALENESS = ("policy_staleness", "kv_staleness")
LATENCIES = ("first_token_latency", "token_latency", "request_latency")
HISTOGRAMS = (*STALENESS, *LATENCIES, "finish_reasons")  # fields that are tuples of counts
# In a fleet's stats these fields are the minimum over the engines; other numbers are sums.
LEAST_OF_FLEET = ("max_sequence_length", "block_size_tokens")
_Report = TypeVar("_Report", "SuspendReport", "ResumeReport")
NUM_AGES = 9  # buckets of a histogram of staleness: one each for 0 to 7 versions, one for older


@dataclass(frozen=True, slots=True, kw_only=True)
class SuspendReport:
    """Report of a suspend.

    mode: the KV mode under which the KV cache is released.
    bytes_released: reserved memory that this call released.
    resident_bytes_released: how much of `bytes_released` was resident. Host blocks that were never
        written are not resident.
    bytes_kept: memory of KV cache and weights that stays reserved.
    bytes_on_host: host copies, from which resume restores.
    released_by_owner, kept_by_owner: `bytes_released` and `bytes_kept` for each resource,
        "kv_cache" and "weights".
    kept_beside: bytes outside both resources that stay, by name: captured "graphs", their "inputs",
        "tables" and buffers of the model, "rows" of requests.
    num_requests_requeued: requests whose KV this call dropped.
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
    """Report of a resume.

    mode: the KV mode of the suspend.
    bytes_restored: device memory that was copied back or made usable again.
    restored_by_owner: `bytes_restored` for each resource.
    graphs_recaptured: number of captured graphs that were dropped. Later steps capture them again.
    num_requests_recomputed: requests that later steps prefill again.
    """

    mode: str
    seconds: float = 0.0
    bytes_restored: int = 0
    restored_by_owner: Mapping[str, int] = field(default_factory=dict)
    graphs_recaptured: int = 0
    num_requests_recomputed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryStatus:
    """Memory of an engine at one moment. The resources are "kv_cache" and "weights".

    resident_bytes: reserved memory of each resource, written or not.
    bytes_on_host: host copies of each resource.
    kv_mode: the KV mode of the last suspend, or the config's mode before the first suspend.
    released: resources whose memory is released.
    to_restore: resources that resume restores, including those of a suspend that failed midway.
    has_weights: False from the time the weights are discarded or mixed until a full update is
        committed.
    lora_base_bytes: host copy of the base values of weights with a LoRA adapter, which suspends
        keep.
    routing_bytes: host memory of the experts recorded for all KV entries, which suspends keep.
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
    """Checksums of one page of the weights.

    checksums: 16 hex digits by Hugging Face name, in the order of names.
    num_weights: the number of weights in all pages.
    """

    checksums: Mapping[str, str]
    num_weights: int
    version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightUpdateReport:
    """Report of a committed update of weights.

    version: the version that is served after the update.
    seconds: the time of staging and commit together.
    stall_seconds: the time from the end of the last step under the old version until the first step
        under the new version can begin. If no request could run, it is the time of the commit.
    num_bytes: bytes written to the model's weights.
    checksum: checksum of all weights, 16 hex digits.
    """

    version: int
    seconds: float
    stall_seconds: float
    num_bytes: int
    checksum: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats(SchedulerCounts):
    """State of an engine: current requests and blocks, and totals since the engine's start.

    num_prompt_tokens: prompt tokens of the requests that have ended.
    policy_staleness: histogram of the age of generated tokens when their request ended, counted in
        versions since the version that sampled the token. The last bucket also counts all older
        tokens.
    kv_staleness: the same histogram, counted since the version that wrote the token's KV.
    finish_reasons, *_latency, num_generated_tokens, num_begun_prompt_tokens: see
        `rollout.engine.counters.RequestTotals`.
    first_token_seconds, token_seconds, request_seconds: sums of the latencies.
    ranks: resources of each rank's process.
    """

    state: EngineState
    weights_version: int
    max_sequence_length: int  # for a fleet: the minimum over its engines
    block_size_tokens: int  # for a fleet: the minimum over its engines
    num_graph_captures: int  # 0 where steps run eagerly
    lora_base_bytes: int  # host copies, on all ranks, of base values of weights with a LoRA adapter
    routing_bytes: int  # host memory of the experts recorded for all KV entries
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
    ranks: tuple[RankUse, ...] = field(compare=False)  # CPU time differs from call to call

    def as_metrics(self, prefix: str = "engine/") -> dict[str, float]:
        """Return the numeric fields by name, each name after `prefix`, for a MetricsWriter. Numbers
        of `ranks` are summed. If there are several ranks, each rank's own numbers are added under
        names such as "rank_0.1/kv_bytes"."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        values |= {name: sum_of_ranks(self.ranks, name) for name in RANK_FIELDS}
        if len(self.ranks) > 1:
            for rank in self.ranks:
                values |= {f"rank_{rank.label}/{n}": getattr(rank, n) for n in RANK_FIELDS}
        return {f"{prefix}{n}": v for n, v in values.items() if isinstance(v, (int, float))}


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetStats:
    """Counters of a fleet at one moment.

    state: the name of the fleet's state.
    together: the merged counters of all engines.
    engines: the counters of each engine by its rank.
    num_queued: requests that wait for an engine.
    refused: number of connections and peers that the coordinator refused, by reason.
    """

    state: str
    together: EngineStats
    engines: Mapping[int, EngineStats]
    num_queued: int = 0
    refused: Mapping[str, int] = field(default_factory=dict)


# ---- reports of several engines as one


def sum_of_reports(nothing: _Report, reports: Iterable[_Report]) -> _Report:
    """Return one report for a fleet: sums of bytes and requests, and the maximum of `seconds`.
    Returns `nothing` if there are no reports."""
    first, *others = list(reports) or [nothing]
    totals = {f.name: getattr(first, f.name) for f in fields(first)}
    for report in others:
        for name, total in totals.items():
            totals[name] = _added(name, total, getattr(report, name))
    return replace(first, **totals) if others else first


def _added(name: str, total: Any, value: Any) -> Any:
    if isinstance(value, str):
        return value
    if isinstance(value, Mapping):
        return {key: total.get(key, 0) + value.get(key, 0) for key in {**total, **value}}
    return max(total, value) if name == "seconds" else total + value


def stats_of_fleet(
    engines: Mapping[int, EngineStats], state: EngineState, weights_version: int
) -> EngineStats:
    """Return one EngineStats for a fleet from each engine's counters, which `engines` has by rank.
    Fields in LEAST_OF_FLEET are the minimum over the engines; other numbers are sums. `state` and
    `weights_version` are the fleet's."""
    numbered = stats_by_engine(engines).values()
    values: dict[str, Any] = {
        "state": state,
        "weights_version": weights_version,
        "ranks": tuple(use for stats in numbered for use in stats.ranks),
    }
    for name in {f.name for f in fields(EngineStats)} - values.keys():
        own = [getattr(stats, name) for stats in numbered]
        if name in HISTOGRAMS:
            values[name] = tuple(map(sum, zip(*own, strict=True)))
        else:
            values[name] = min(own, default=0) if name in LEAST_OF_FLEET else sum(own)
    return EngineStats(**values)


def stats_by_engine(engines: Mapping[int, EngineStats]) -> dict[int, EngineStats]:
    """Return the engines' counters in the order of ranks. Each RankUse gets the number of its
    engine."""
    return {
        rank: replace(stats, ranks=tuple(replace(use, engine=rank) for use in stats.ranks))
        for rank, stats in sorted(engines.items())
    }
