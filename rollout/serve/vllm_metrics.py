"""The families of vLLM's GET /metrics, of each engine: what its clients and dashboards steer by."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from rollout.control.reports import EngineStats
from rollout.control.state import EngineState
from rollout.engine.counters import FINISH_REASONS, LATENCY_BOUNDS_S

_LABELS = ("model_name", "engine")
_BOUNDS = [*map(floatToGoString, LATENCY_BOUNDS_S), "+Inf"]
# Name, meaning, value.
_COUNTERS: tuple[tuple[str, str, Callable[[EngineStats], float]], ...] = (
    (
        "prompt_tokens",
        "Tokens of prompts that got a first token",
        lambda s: s.num_begun_prompt_tokens,
    ),
    ("generation_tokens", "Tokens that requests were given", lambda s: s.num_generated_tokens),
    (
        "num_preemptions",
        "Requests that lost their KV for want of blocks",
        lambda s: s.num_evictions,
    ),
    (
        "prefix_cache_queries",
        "Tokens of requests that began or began again, by their KV: found or computed",
        lambda s: s.num_prefix_hit_tokens + s.num_prefill_tokens,
    ),
    ("prefix_cache_hits", "Tokens whose KV was found", lambda s: s.num_prefix_hit_tokens),
)
# Name, the field of EngineStats with its counts, the field with its sum.
_HISTOGRAMS = (
    ("time_to_first_token_seconds", "first_token_latency", "first_token_seconds"),
    ("inter_token_latency_seconds", "token_latency", "token_seconds"),
    ("e2e_request_latency_seconds", "request_latency", "request_seconds"),
)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)  # a registry hashes its collectors
class VllmFamilies(Collector):
    """The families, as of now.

    engines: by rank. num_queued: requests that wait for an engine; they are reported as waiting at
    the engines, in equal parts. sleeps: whether the server sleeps, though memory is not released.
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
        """Running and waiting requests add up to all that engines and their queue have.

        A request waits if the last step had no room for it. What has come since, or waits for the
        prefill of its group's prompt, counts as running: it is in the next step or a later one as
        soon as that has run.
        """
        running = GaugeMetricFamily("vllm:num_requests_running", "In steps", labels=_LABELS)
        waiting = GaugeMetricFamily("vllm:num_requests_waiting", "Without room", labels=_LABELS)
        by_reason = GaugeMetricFamily(
            "vllm:num_requests_waiting_by_reason", "Without room", labels=(*_LABELS, "reason")
        )
        for place, (labels, stats) in enumerate(self._labelled()):
            num_here = stats.num_waiting + stats.num_running + stats.num_paused
            num_waiting = stats.num_paused + (
                stats.num_without_room if stats.state is EngineState.RUNNING else stats.num_waiting
            )
            running.add_metric(labels, num_here - num_waiting)
            num_waiting += (self.num_queued + place) // len(self.engines)
            waiting.add_metric(labels, num_waiting)
            by_reason.add_metric([*labels, "capacity"], num_waiting)
            by_reason.add_metric([*labels, "deferred"], 0)
        yield from (running, waiting, by_reason)

    def _memory(self) -> Iterator[Metric]:
        usage = GaugeMetricFamily("vllm:kv_cache_usage_perc", "1 is all of it", labels=_LABELS)
        config = GaugeMetricFamily(
            "vllm:cache_config_info",
            "1; the numbers are in the labels",
            labels=("engine", "block_size", "num_gpu_blocks", "kv_cache_size_tokens"),
        )
        sleep = GaugeMetricFamily(
            "vllm:engine_sleep_state", "1 where it is so", labels=(*_LABELS, "sleep_state")
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
