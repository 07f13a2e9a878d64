"""GET /metrics: counters of the server and of the engines, for Prometheus."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import fields
from typing import Any

from aiohttp import web
from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector

from rollout.control.reports import HISTOGRAMS, NUM_AGES, STALENESS, EngineStats
from rollout.serve.control.state import CONTROL
from rollout.serve.errors import ApiError
from rollout.serve.state import STATE, Route, ServerState, get_route
from rollout.serve.vllm_metrics import VllmFamilies
from rollout.telemetry import RANK_FIELDS, RankUse, SchedulerCounts

_ANSWER_S = 5.0
# Fields of EngineStats that are gauges; all other numbers only grow.
_GAUGES = {
    "weights_version",
    "max_sequence_length",
    "block_size_tokens",
    "lora_base_bytes",
    "routing_bytes",
    *(field.name for field in fields(SchedulerCounts)),
}


def metrics_routes() -> list[Route]:
    return [get_route("/metrics", _metrics, "For Prometheus")]


async def _metrics(request: web.Request, body: Any) -> web.Response:
    state, registry = request.app[STATE], CollectorRegistry()
    try:
        fleet = await asyncio.wait_for(state.llm.fleet_stats(), _ANSWER_S)
    except asyncio.TimeoutError:
        raise ApiError(503, f"an engine has not answered within {_ANSWER_S:g} seconds") from None
    control = request.app.get(CONTROL)
    registry.register(_Present(state, fleet.together))
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


class _Present(Collector):
    """Collects the present state of the server and the engines."""

    def __init__(self, state: ServerState, stats: EngineStats) -> None:
        self._state, self._stats = state, stats

    def collect(self) -> Iterator[Metric]:
        limiter, live = self._state.limiter, self._state.live
        for name, value in (
            ("http_requests_running", limiter.num_running),
            ("http_requests_waiting", limiter.num_waiting),
            ("samples_running", live.num_samples),
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
    """Yield the CPU time and memory of each rank of each engine."""
    for name in RANK_FIELDS:
        is_gauge = name.endswith("_bytes")
        kind = GaugeMetricFamily if is_gauge else CounterMetricFamily
        text = "Of one process, " + ("as of now" if is_gauge else "since its start")
        family = kind(f"rollout_rank_{name}", text, labels=["engine", "rank"])
        for use in ranks:
            family.add_metric([str(use.engine), str(use.rank)], getattr(use, name))
        yield family


def _by_age(name: str, num_tokens: Sequence[int]) -> Metric:
    """Return generated tokens of requests that have ended by their age in versions; the last number
    is of all that are older."""
    ages = [*map(str, range(NUM_AGES - 1)), f"{NUM_AGES - 1}+"]
    family = CounterMetricFamily(name, "Tokens by their age in versions", labels=["versions"])
    for age, number in zip(ages, num_tokens or [0] * NUM_AGES, strict=True):
        family.add_metric([age], number)
    return family
