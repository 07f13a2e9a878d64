"""Snapshots of a fleet for display: the state, counts and rates of each engine.

`rollout.serve.server` makes a FleetFeed, which `rollout.serve.page.routes` reads.
`rollout.cli.top` makes a coordinator's snapshots by FleetView. Nothing here changes an engine.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rollout.control.reports import EngineStats, FleetStats
from rollout.errors import RolloutError

if TYPE_CHECKING:  # rollout.serve.llm imports torch, which `rollout top` does not need
    from rollout.serve.llm import ServedLLM

_logger = logging.getLogger(__name__)
INTERVAL_S = 1.0

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

    time: Unix time in seconds.
    engines: a dict for each engine with its "rank", "state", "weights_version", counts, sums of
        latencies, and rates since the previous snapshot.
    refused: number of connections that the coordinator has refused, by reason.
    """

    time: float
    state: str
    weights_version: int
    engines: list[dict[str, Any]]
    refused: dict[str, int] = field(default_factory=dict)

    def total(self, name: str) -> float:
        """Return the sum of the count or rate `name` over the engines."""
        return float(sum(engine[name] for engine in self.engines))


class FleetView:
    """Makes snapshots of a fleet. Keeps the previous counters to compute rates."""

    def __init__(self) -> None:
        self._before: dict[int, tuple[float, EngineStats]] = {}

    def snapshot(self, fleet: FleetStats, now: float | None = None) -> FleetSnapshot:
        """Return a snapshot of `fleet`. `now` is a time of time.monotonic(), by default the
        present."""
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
            # A restarted engine counts from 0 again.
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
            "num_first_tokens": sum(stats.first_token_latency),
            "first_token_seconds": stats.first_token_seconds,
            "num_later_tokens": sum(stats.token_latency),
            "token_seconds": stats.token_seconds,
            **rates,
        }


class FleetFeed:
    """Reads the engines' counters once a second for all watchers, while there are any. A slow
    watcher misses snapshots.

    num_watchers: number of running `snapshots` iterations, one for each client of GET /events.
    """

    def __init__(self, llm: ServedLLM) -> None:
        self._llm = llm
        self._latest: FleetSnapshot | None = None
        self._is_new = asyncio.Event()
        self._polling: asyncio.Task[None] | None = None
        self._is_closed = False
        self.num_watchers = 0

    async def snapshots(self) -> AsyncGenerator[FleetSnapshot, None]:
        """Yield each new snapshot until `close` is called."""
        self.num_watchers += 1
        if self._polling is None:
            self._polling = asyncio.ensure_future(self._poll())
        try:
            while not self._is_closed:  # `close` can be called while a page reads a snapshot
                await self._is_new.wait()
                if self._is_closed:
                    return
                assert self._latest is not None
                yield self._latest
        finally:
            self.num_watchers -= 1
            if not self.num_watchers and self._polling is not None:
                self._polling.cancel()
                self._polling = None

    def close(self) -> None:
        self._is_closed = True
        self._is_new.set()

    async def _poll(self) -> None:
        view = FleetView()
        while not self._is_closed:
            try:
                self._latest = view.snapshot(await self._llm.fleet_stats())
            except RolloutError as error:  # the fleet is ending or busy
                _logger.debug("the engines returned no counters: %s", error)
            else:
                # Wakes the present watchers. The next wait needs an event that is not set.
                self._is_new.set()
                self._is_new = asyncio.Event()
            await asyncio.sleep(INTERVAL_S)
