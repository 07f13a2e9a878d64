"""FleetView: state, counts and rates of each engine of a fleet."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from rollout.control.reports import EngineStats, FleetStats

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
    """Makes snapshots of a fleet's counters; keeps the latest ones, for rates."""

    def __init__(self) -> None:
        self._before: dict[int, tuple[float, EngineStats]] = {}

    def snapshot(self, fleet: FleetStats, now: float | None = None) -> FleetSnapshot:
        """Return a snapshot. now: monotonic seconds, for rates."""
        now = time.monotonic() if now is None else now
        engines = [self._engine(rank, stats, now) for rank, stats in fleet.engines.items()]
        self._before = {rank: (now, stats) for rank, stats in fleet.engines.items()}
        return FleetSnapshot(
            time=time.time(),
            state=fleet.state,
            weights_version=fleet.together.weights_version,
            engines=engines,
            refused=dict(fleet.refused),
        )

    def _engine(self, rank: int, stats: EngineStats, now: float) -> dict[str, Any]:
        then, before = self._before.get(rank, (now, stats))
        seconds = now - then
        rates = {
            # An engine that was started again counts from 0.
            name: max(0, getattr(stats, count) - getattr(before, count)) / seconds
            if seconds > 0
            else 0.0
            for name, count in _RATES.items()
        }
        return {
            "rank": rank,
            "state": stats.state.name,
            "weights_version": stats.weights_version,
            **{name: getattr(stats, name) for name in _COUNTS},
            **rates,
        }
