"""What a fleet's engines report of a command, as one report."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from rollout.coordinator.core.fleet import CoordinatorState
from rollout.engine.reports import EngineStats, ResumeReport, SuspendReport
from rollout.runner.weight_update import WeightUpdateReport

# {"state", "weights_version", "ranks": {rank: report}, "lost_ranks"}, as a coordinator answers.
Results = Mapping[str, Any]
Report = Mapping[str, Any]


def suspend_report(results: Results) -> SuspendReport:
    """Bytes and requests of all engines together; they work side by side, so the longest time."""
    return SuspendReport(**_together(results))


def resume_report(results: Results) -> ResumeReport:
    """As `suspend_report`."""
    return ResumeReport(**_together(results))


def weight_update_report(results: Results, seconds: float) -> WeightUpdateReport:
    """`seconds`: as the one saw it who asked. `num_bytes` of one engine, the longest stall."""
    reports = _of_ranks(results)
    return WeightUpdateReport(
        version=results["weights_version"],
        seconds=seconds,
        stall_seconds=max((r["stall_seconds"] for r in reports), default=0.0),
        num_bytes=max((r["num_bytes"] for r in reports), default=0),
        checksum=next((r["checksum"] for r in reports), ""),
    )


def engine_stats(results: Results) -> EngineStats:
    """Sums over the engines; state and version are those of the fleet."""
    reports = _of_ranks(results)
    counted = [f.name for f in fields(EngineStats) if f.name not in ("state", "weights_version")]
    return EngineStats(
        state=CoordinatorState[results["state"]].engine_state,
        weights_version=results["weights_version"],
        **{name: sum(report[name] for report in reports) for name in counted},
    )


def _of_ranks(results: Results) -> Sequence[Report]:
    """Engines that were where they should be already have nothing to report."""
    return [report for report in results["ranks"].values() if report]


def _together(results: Results) -> dict[str, Any]:
    together: dict[str, Any] = {"mode": ""}
    for report in _of_ranks(results):
        for name, value in report.items():
            if isinstance(value, str):
                together[name] = value
            elif isinstance(value, Mapping):
                together[name] = dict(Counter(together.get(name, {})) + Counter(value))
            elif name == "seconds":
                together[name] = max(together.get(name, 0.0), value)
            else:
                together[name] = together.get(name, 0) + value
    return together
