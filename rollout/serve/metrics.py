"""GET /metrics: counters of the server and its engines for Prometheus, also under vLLM's names.

`rollout.serve.app` registers the route. It reads counters and changes nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import accumulate
from typing import Any

from aiohttp import web
from prometheus_client import CollectorRegistry
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from rollout.control.reports import HISTOGRAMS, NUM_AGES, STALENESS, EngineStats
from rollout.control.state import EngineState
from rollout.engine.counters import FINISH_REASONS, LATENCY_BOUNDS_S
from rollout.serve.control.state import CONTROL
from rollout.serve.errors import ApiError
from rollout.serve.state import STATE, Route, ServerState, get_route
from rollout.telemetry import RANK_FIELDS, RankUse, SchedulerCounts

_ANSWER_S = 5.0
# Numbers in EngineStats that can fall. All others only grow.
_GAUGES = {
    "weights_version",
    "max_sequence_length",
    "block_size_tokens",
    "lora_base_bytes",
    "routing_bytes",
    *(field.name for field in fields(SchedulerCounts)),
}
_LABELS = ("model_name", "engine")
_BOUNDS = [*map(floatToGoString, LATENCY_BOUNDS_S), "+Inf"]
# Entries are (name, help text, function that returns the value).
_COUNTERS: tuple[tuple[str, str, Callable[[EngineStats], float]], ...] = (
    (
        "prompt_tokens",
        "Tokens of prompts that got a first token",
        lambda s: s.num_begun_prompt_tokens,
    ),
    ("generation_tokens", "Generated tokens", lambda s: s.num_generated_tokens),
    (
        "num_preemptions",
        "Requests preempted for want of KV blocks",
        lambda s: s.num_evictions,
    ),
    (
        "prefix_cache_queries",
        "Tokens whose KV was found or computed when a request began, or began again",
        lambda s: s.num_prefix_hit_tokens + s.num_prefill_tokens,
    ),
    ("prefix_cache_hits", "Tokens whose KV was found", lambda s: s.num_prefix_hit_tokens),
)
# Entries are (name, field of EngineStats with the counts, field of EngineStats with the sum).
_HISTOGRAMS = (
    ("time_to_first_token_seconds", "first_token_latency", "first_token_seconds"),
    ("inter_token_latency_seconds", "token_latency", "token_seconds"),
    ("e2e_request_latency_seconds", "request_latency", "request_seconds"),
)


def metrics_routes() -> list[Route]:
    return [get_route("/metrics", _metrics, "For Prometheus")]


async def _metrics(request: web.Request, body: Any) -> web.Response:
    state, registry = request.app[STATE], CollectorRegistry()
    try:
        fleet = await asyncio.wait_for(state.llm.fleet_stats(), _ANSWER_S)
    except asyncio.TimeoutError:
        raise ApiError(
            503,
            f"an engine has not answered within {_ANSWER_S:g} seconds; ask again, or look for its "
            "error in the server's log",
        ) from None
    control = request.app.get(CONTROL)
    registry.register(_OwnFamilies(state, fleet.together))
    registry.register(
        VllmFamilies(
            model_name=state.served_name,
            engines=fleet.engines,
            num_queued=fleet.num_queued + state.limiter.num_waiting,
            sleeps=control is not None and control.pausing.is_asleep,
        )
    )
    text = generate_latest(state.metrics.registry) + generate_latest(registry)
    return web.Response(body=text, headers={"Content-Type": CONTENT_TYPE_LATEST})


class _OwnFamilies(Collector):
    """Metrics of the server, and a metric for each field of EngineStats summed over the engines."""

    def __init__(self, state: ServerState, stats: EngineStats) -> None:
        self._state, self._stats = state, stats

    def collect(self) -> Iterator[Metric]:
        limiter, live = self._state.limiter, self._state.live
        for name, value in (
            ("http_requests_running", limiter.num_running),
            ("http_requests_waiting", limiter.num_waiting),
            ("samples_running", live.num_unfinished_samples),
        ):
            yield GaugeMetricFamily(f"rollout_{name}", "As of now", value=value)
        for field in fields(EngineStats):
            value, name = getattr(self._stats, field.name), f"rollout_engine_{field.name}"
            if field.name == "state":
                states = GaugeMetricFamily(name, "1 for the state of the fleet", labels=["state"])
                states.add_metric([value.name], 1.0)
                yield states
            elif field.name == "ranks":
                yield from _by_rank(value)
            elif field.name in STALENESS:
                yield _by_age(name, value)
            elif field.name in HISTOGRAMS:
                continue  # see VllmFamilies
            elif field.name in _GAUGES:
                yield GaugeMetricFamily(name, "Of all engines, as of now", value=value)
            else:
                yield CounterMetricFamily(name, "Of all engines, since their start", value=value)


def _by_rank(ranks: Sequence[RankUse]) -> Iterator[Metric]:
    """Yield a metric for each field of RankUse, with a value for each rank of each engine."""
    for name in RANK_FIELDS:
        is_gauge = name.endswith("_bytes")
        kind = GaugeMetricFamily if is_gauge else CounterMetricFamily
        text = "Of one process, " + ("as of now" if is_gauge else "since its start")
        family = kind(f"rollout_rank_{name}", text, labels=["engine", "rank"])
        for use in ranks:
            family.add_metric([str(use.engine), str(use.rank)], getattr(use, name))
        yield family


def _by_age(name: str, num_tokens: Sequence[int]) -> Metric:
    """Return a metric of the generated tokens of ended requests, by their age in weights versions.
    The last age includes all older tokens."""
    ages = [*map(str, range(NUM_AGES - 1)), f"{NUM_AGES - 1}+"]
    family = CounterMetricFamily(name, "Tokens by their age in versions", labels=["versions"])
    for age, number in zip(ages, num_tokens or [0] * NUM_AGES, strict=True):
        family.add_metric([age], number)
    return family


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)  # a registry hashes its collectors
class VllmFamilies(Collector):
    """Metrics of each engine under vLLM's names, for clients and dashboards of vLLM.

    engines: counters of each engine by engine rank.
    num_queued: requests that wait for an engine. An equal share counts as waiting at each engine.
    sleeps: whether a call of /sleep is in force, even if it released no memory.
    """

    model_name: str
    engines: Mapping[int, EngineStats]
    num_queued: int
    sleeps: bool

    def collect(self) -> Iterator[Metric]:
        yield from self._requests()
        yield from self._memory()
        for name, meaning, value_of in _COUNTERS:
            counter = CounterMetricFamily(f"vllm:{name}", meaning, labels=_LABELS)
            for labels, stats in self._labelled():
                counter.add_metric(labels, value_of(stats))
            yield counter
        ends = CounterMetricFamily(
            "vllm:request_success", "Ended requests", labels=(*_LABELS, "finished_reason")
        )
        for labels, stats in self._labelled():
            for reason, number in zip(FINISH_REASONS, stats.finish_reasons, strict=True):
                ends.add_metric([*labels, reason], number)
        yield ends
        yield from self._histograms()

    def _labelled(self) -> Iterator[tuple[list[str], EngineStats]]:
        for rank, stats in self.engines.items():
            yield [self.model_name, str(rank)], stats

    def _requests(self) -> Iterator[Metric]:
        """Yield the numbers of running and waiting requests, which add up to all requests. A
        request is waiting if it is preempted or the last step had no room for it. A request that
        came after the last step, or waits for its group's prefill, counts as running. While an
        engine is stopped, its requests that have not begun are waiting."""
        running = GaugeMetricFamily("vllm:num_requests_running", "Running requests", labels=_LABELS)
        waiting = GaugeMetricFamily("vllm:num_requests_waiting", "Waiting requests", labels=_LABELS)
        by_reason = GaugeMetricFamily(
            "vllm:num_requests_waiting_by_reason",
            "Waiting requests by reason",
            labels=(*_LABELS, "reason"),
        )
        for index, (labels, stats) in enumerate(self._labelled()):
            num_here = stats.num_waiting + stats.num_running + stats.num_paused
            num_waiting = stats.num_paused + (
                stats.num_without_room if stats.state is EngineState.RUNNING else stats.num_waiting
            )
            running.add_metric(labels, num_here - num_waiting)
            num_waiting += (self.num_queued + index) // len(self.engines)
            waiting.add_metric(labels, num_waiting)
            by_reason.add_metric([*labels, "capacity"], num_waiting)
            by_reason.add_metric([*labels, "deferred"], 0)
        yield from (running, waiting, by_reason)

    def _memory(self) -> Iterator[Metric]:
        usage = GaugeMetricFamily(
            "vllm:kv_cache_usage_perc", "Used share of the KV cache, in [0, 1]", labels=_LABELS
        )
        config = GaugeMetricFamily(
            "vllm:cache_config_info",
            "Always 1; the sizes are in the labels",
            labels=("engine", "block_size", "num_gpu_blocks", "kv_cache_size_tokens"),
        )
        sleep = GaugeMetricFamily(
            "vllm:engine_sleep_state",
            "1 for the engine's present state, else 0",
            labels=(*_LABELS, "sleep_state"),
        )
        for labels, stats in self._labelled():
            size, num_blocks = stats.block_size_tokens, stats.num_blocks_total
            usage.add_metric(labels, stats.num_blocks_used / max(1, num_blocks))
            numbers = map(str, (size, num_blocks, size * num_blocks))
            config.add_metric([labels[1], *numbers], 1)
            for state, is_so in self._sleep_states(stats).items():
                sleep.add_metric([*labels, state], is_so)
        yield from (usage, config, sleep)

    def _sleep_states(self, stats: EngineStats) -> dict[str, bool]:
        is_suspended = stats.state is EngineState.SUSPENDED
        is_stopped = stats.state is not EngineState.RUNNING
        is_released = is_suspended and not sum(rank.weights_bytes for rank in stats.ranks)
        is_on_host = sum(rank.weights_on_host_bytes for rank in stats.ranks) > 0
        return {
            "awake": not is_suspended and not (self.sleeps and is_stopped),
            "weights_offloaded": is_released and is_on_host,
            "discard_all": is_released and not is_on_host,
        }

    def _histograms(self) -> Iterator[Metric]:
        for name, counts_field, sum_field in _HISTOGRAMS:
            histogram = HistogramMetricFamily(
                f"vllm:{name}", "From the entry into an engine", labels=_LABELS
            )
            for labels, stats in self._labelled():
                totals = accumulate(getattr(stats, counts_field))
                buckets = list(zip(_BOUNDS, totals, strict=True))
                histogram.add_metric(labels, buckets, sum_value=getattr(stats, sum_field))
            yield histogram
