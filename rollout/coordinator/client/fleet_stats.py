"""The counters of a fleet, as a coordinator answers STATS: of each engine, and of all together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from rollout.control.reports import HISTOGRAMS, LEAST_OF_FLEET, EngineStats
from rollout.control.state import EngineState
from rollout.coordinator.core.fleet import CoordinatorState
from rollout.telemetry import RankUse

Results = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetStats:
    """Counters of a fleet at one moment.

    state: the fleet's state by name. together: the counters of all engines as one. engines: the
    counters of each engine by its rank. num_queued: requests that wait for an engine. refused:
    connections and peers that the coordinator has refused, by reason.
    """

    state: str
    together: EngineStats
    engines: Mapping[int, EngineStats]
    num_queued: int = 0
    refused: Mapping[str, int] = field(default_factory=dict)


def fleet_stats(results: Results) -> FleetStats:
    """Return the answer of a coordinator to STATS as counters."""
    return FleetStats(
        state=results["state"],
        together=engine_stats(results),
        engines=stats_by_engine(results),
        num_queued=results.get("num_queued", 0),
        refused=dict(results.get("refused", {})),
    )


def engine_stats(results: Results) -> EngineStats:
    """Return the counters of all engines together: sums, and the fleet's own state and version."""
    reports = [report for report in results["ranks"].values() if report]
    each = stats_by_engine(results).values()
    values: dict[str, Any] = {
        "state": CoordinatorState[results["state"]].engine_state,
        "weights_version": results["weights_version"],
        **{name: min((r[name] for r in reports), default=0) for name in LEAST_OF_FLEET},
        "ranks": tuple(rank for stats in each for rank in stats.ranks),
    }
    for name in HISTOGRAMS:
        values[name] = tuple(map(sum, zip(*(report[name] for report in reports), strict=True)))
    for name in {f.name for f in fields(EngineStats)} - values.keys():
        values[name] = sum(report[name] for report in reports)
    return EngineStats(**values)


def stats_by_engine(results: Results) -> dict[int, EngineStats]:
    """Return the state and counters of each engine by its rank, in order."""
    ranks = sorted((int(rank), report) for rank, report in results["ranks"].items() if report)
    engines = {}
    for rank, report in ranks:
        histograms = {name: tuple(report[name]) for name in HISTOGRAMS}
        state = EngineState[report["state"]]
        uses = tuple(RankUse(**{**use, "engine": rank}) for use in report["ranks"])
        changed = {**histograms, "state": state, "ranks": uses}
        engines[rank] = EngineStats(**{**report, **changed})
    return engines
