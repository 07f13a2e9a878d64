"""WeightPush: the updates that an AsyncLLM gives to its fleet, one at a time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress

from rollout.apis.results import Results, weight_update_report
from rollout.coordinator.protocol.messages import WeightsSource
from rollout.coordinator.publisher import WeightPublisher
from rollout.runner.weight_update import NamedTensors, WeightUpdateReport

PUBLISH_S = 60.0  # how long `close` waits for an update that is copying its tensors


class WeightPush:
    """Owns the one copy in shared memory that engines fetch from."""

    def __init__(self, *, reject_non_finite: bool) -> None:
        self._publisher = WeightPublisher(reject_non_finite=reject_non_finite)
        self._turn = asyncio.Lock()

    async def push(
        self,
        named_tensors: NamedTensors,
        check: Callable[[], Awaitable[object]],
        order: Callable[[WeightsSource], Awaitable[Results]],
    ) -> WeightUpdateReport:
        """Publish the tensors, `order` the engines to take them, and keep the copy for engines that
        come later; if that is refused, keep the copy before. `check` is awaited once it is this
        update's turn, and may raise.
        """
        async with self._turn:
            await check()
            start = time.perf_counter()
            source = await asyncio.to_thread(self._publisher.publish, named_tensors)
            try:
                results = await order(source)
            except BaseException:  # a cancelled update is refused, too
                await asyncio.to_thread(self._publisher.drop)
                raise
            # In a thread: to return gigabytes to the system would keep streams waiting.
            await asyncio.to_thread(self._publisher.commit)
            return weight_update_report(results, time.perf_counter() - start)

    async def close(self) -> None:
        """Give the memory back. An update that is publishing cannot be stopped: it drops its
        weights itself, and is waited for."""
        try:
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._turn.acquire(), PUBLISH_S)
                self._turn.release()
        finally:
            await asyncio.to_thread(self._publisher.close)
