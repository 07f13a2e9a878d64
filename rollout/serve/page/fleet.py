"""FleetView: what each engine of a fleet does now, and how many tokens per second."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

_COUNTS = (
    *("num_waiting", "num_running", "num_paused"),
    *("num_blocks_used", "num_blocks_indexed", "num_blocks_total"),
    *("num_finished", "num_failed", "num_evictions", "num_weight_updates"),
)
_RATES = {
    "generated_tokens_per_s": "num_sampled_tokens",
    "prefill_tokens_per_s": "num_prefill_tokens",
    "steps_per_s": "num_steps",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetSnapshot:
    """A fleet at one moment.

    time: seconds since 1970. engines: by rank; "rank", "state", "weights_version", counts and
    rates, as plain numbers. Rates are since the snapshot before. refused: connections and peers
    that the coordinator has refused, by reason.
    """

    time: float
    state: str
    weights_version: int
    engines: list[dict[str, Any]]
    refused: dict[str, int] = field(default_factory=dict)

    def total(self, name: str) -> float:
        """Return the sum of a count or rate over the engines."""
        return float(sum(engine[name] for engine in self.engines))


class FleetView:
    """Makes snapshots of what a coordinator answers; keeps the latest counters, for rates."""

    def __init__(self) -> None:
        self._before: dict[str, tuple[float, Mapping[str, Any]]] = {}

    def snapshot(self, results: Mapping[str, Any], now: float | None = None) -> FleetSnapshot:
        """`results`: of the stats command. now: monotonic seconds, for rates."""
        now = time.monotonic() if now is None else now
        reports = {str(rank): report for rank, report in results["ranks"].items() if report}
        engines = [self._engine(rank, reports[rank], now) for rank in sorted(reports, key=int)]
        self._before = {rank: (now, report) for rank, report in reports.items()}
        return FleetSnapshot(
            time=time.time(),
            state=results["state"],
            weights_version=results["weights_version"],
            engines=engines,
            refused=dict(results.get("refused", {})),
        )

    def _engine(self, rank: str, report: Mapping[str, Any], now: float) -> dict[str, Any]:
        then, before = self._before.get(rank, (now, report))
        seconds = now - then
        rates = {
            # An engine that was started again counts from 0.
            name: max(0, report[count] - before[count]) / seconds if seconds > 0 else 0.0
            for name, count in _RATES.items()
        }
        return {
            "rank": int(rank),
            "state": report["state"],
            "weights_version": report["weights_version"],
            **{name: report[name] for name in _COUNTS},
            **rates,
        }
