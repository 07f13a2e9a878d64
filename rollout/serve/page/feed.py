"""FleetFeed: snapshots of the engines' counters, once a second while a page is open."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator

from rollout.errors import RolloutError
from rollout.serve.llm import ServedLLM
from rollout.serve.page.fleet import FleetSnapshot, FleetView

_logger = logging.getLogger(__name__)
INTERVAL_S = 1.0


class FleetFeed:
    """Asks the engines once for all open pages. A slow page misses snapshots."""

    def __init__(self, llm: ServedLLM) -> None:
        self._llm = llm
        self._latest: FleetSnapshot | None = None
        self._has_news = asyncio.Event()
        self._asking: asyncio.Task[None] | None = None
        self._is_closed = False
        self.num_watchers = 0

    async def snapshots(self) -> AsyncGenerator[FleetSnapshot, None]:
        """Yield each new snapshot until `close`."""
        self.num_watchers += 1
        if self._asking is None:
            self._asking = asyncio.ensure_future(self._ask())
        try:
            while not self._is_closed:  # a slow one may have missed the news of it
                await self._has_news.wait()
                if self._is_closed:
                    return
                assert self._latest is not None
                yield self._latest
        finally:
            self.num_watchers -= 1
            if not self.num_watchers and self._asking is not None:
                self._asking.cancel()
                self._asking = None

    def close(self) -> None:
        """End all iterations of `snapshots`."""
        self._is_closed = True
        self._has_news.set()

    async def _ask(self) -> None:
        view = FleetView()
        while not self._is_closed:
            try:
                self._latest = view.snapshot(await self._llm.fleet_stats())
            except RolloutError as error:  # a fleet that ends, or is busy
                _logger.debug("no counters: %s", error)
            else:
                # Whoever waits now gets this one; the event is then as if it had not been set.
                self._has_news.set()
                self._has_news = asyncio.Event()
            await asyncio.sleep(INTERVAL_S)
