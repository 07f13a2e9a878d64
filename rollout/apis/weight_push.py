"""WeightPush: the weight updates of an AsyncLLM, one at a time. It owns the weight transport."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial

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
        """Takes the arguments of `transport_of` and raises its errors."""
        self._transport_of = partial(
            transport_of, reject_non_finite=reject_non_finite, own_host=own_host
        )
        self._transport = self._transport_of(transport)
        self._superseded: list[WeightTransport] = []  # engines may still fetch from them
        self._lock = asyncio.Lock()

    def use(self, transport: str | WeightTransport) -> None:
        """Send later updates by `transport`, from any thread. Raises ConfigError.

        Committed weights of the transport before stay until other full weights are committed.
        """
        following = self._transport_of(transport)
        if following is not self._transport:
            self._superseded.append(self._transport)
            self._transport = following

    async def push(
        self,
        named_tensors: NamedTensors,
        check: Callable[[], Awaitable[object]],
        update: Callable[[WeightsSource], Awaitable[WeightUpdateReport]],
    ) -> WeightUpdateReport:
        """Publish the tensors, `update` the engines from their source, and send them meanwhile.

        Then commit: the weights stay, for engines that come later. If the engines refuse, roll
        back: the weights before stay. `check` is awaited once earlier updates have ended, and may
        raise.
        """
        async with self._lock:
            await check()
            start, transport = time.perf_counter(), self._transport
            source = await asyncio.to_thread(transport.publish, named_tensors)
            sending = asyncio.ensure_future(asyncio.to_thread(_send, transport, source))
            try:
                report = await update(source)
            except BaseException as error:  # a cancelled update is rolled back, too
                # Which also ends a send that no engine receives any more.
                await asyncio.to_thread(transport.roll_back)
                fault = await sending
                if fault is not None:
                    raise error from fault
                raise
            await sending  # engines have all of it
            # In a thread: returning gigabytes to the system would block streams.
            await asyncio.to_thread(self._commit, transport, source)
            return replace(report, seconds=time.perf_counter() - start)

    def _commit(self, transport: WeightTransport, source: WeightsSource) -> None:
        transport.commit()
        if source.stands_alone:
            superseded, self._superseded = self._superseded, []
            for each in superseded:
                if each is transport:  # `use` was called during the push
                    self._superseded.append(each)
                else:
                    each.close()

    async def close(self) -> None:
        """Release all weights.

        An update that is publishing cannot be stopped: it rolls back by itself. This waits for it.
        """
        try:
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._lock.acquire(), PUBLISH_S)
                self._lock.release()
        finally:
            for transport in (*self._superseded, self._transport):
                await asyncio.to_thread(transport.close)


def _send(transport: WeightTransport, source: WeightsSource) -> WeightUpdateError | None:
    """Return the fault of sending. The engines report it, too, in their votes."""
    try:
        transport.send(source)
    except WeightUpdateError as fault:
        _logger.warning("sending weights failed: %s", fault)
        return fault
    return None
