"""WeightPush: the updates that an AsyncLLM gives to its fleet, one at a time."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import replace

from rollout.control.reports import WeightUpdateReport
from rollout.errors import WeightUpdateError
from rollout.weights.source import WeightsSource
from rollout.weights.transports.base import WeightTransport
from rollout.weights.transports.registry import transport_of
from rollout.weights.update import NamedTensors

_logger = logging.getLogger(__name__)
PUBLISH_S = 60.0  # how long `close` waits for an update that is copying its tensors


class WeightPush:
    """Owns the transport by which weights come to the engines."""

    def __init__(
        self,
        transport: str | WeightTransport | None,
        reject_non_finite: bool,
        own_host: Callable[[], str],
    ) -> None:
        """All of it, and the errors, as for `transport_of`."""
        self._transport = transport_of(
            transport, reject_non_finite=reject_non_finite, own_host=own_host
        )
        self._turn = asyncio.Lock()

    async def push(
        self,
        named_tensors: NamedTensors,
        check: Callable[[], Awaitable[object]],
        update: Callable[[WeightsSource], Awaitable[WeightUpdateReport]],
    ) -> WeightUpdateReport:
        """Publish the tensors, have `update` commit them on the engines, send them meanwhile, and
        keep them for engines that join later. If the update is refused, keep the weights before it.
        `check` is awaited when earlier updates have ended, and may raise.
        """
        async with self._turn:
            await check()
            start = time.perf_counter()
            source = await asyncio.to_thread(self._transport.publish, named_tensors)
            sending = asyncio.ensure_future(asyncio.to_thread(self._send, source))
            try:
                report = await update(source)
            except BaseException as error:  # a cancelled update is refused, too
                # The drop ends a send that nobody takes any more.
                await asyncio.to_thread(self._transport.drop)
                fault = await sending
                if fault is not None:
                    raise error from fault
                raise
            await sending  # engines have all of it
            # In a thread: to return gigabytes to the system would keep streams waiting.
            await asyncio.to_thread(self._transport.commit)
            return replace(report, seconds=time.perf_counter() - start)

    def _send(self, source: WeightsSource) -> WeightUpdateError | None:
        """Return the fault of sending. The engines learn of it, too: it is in their votes."""
        try:
            self._transport.send(source)
        except WeightUpdateError as fault:
            _logger.warning("sending weights failed: %s", fault)
            return fault
        return None

    async def close(self) -> None:
        """Release all weights. An update that is publishing cannot be stopped: it drops its
        weights itself, and is waited for."""
        try:
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._turn.acquire(), PUBLISH_S)
                self._turn.release()
        finally:
            await asyncio.to_thread(self._transport.close)
