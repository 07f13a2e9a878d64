"""WeightPush: carries out the weight updates of an AsyncLLM, one at a time.

Used by `rollout.apis.async_llm`. It publishes weights on the weight transport, commits them or
rolls them back, and closes the transport.
"""

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
PUBLISH_S = 60.0  # longest wait of `close` for an update that copies its tensors


class WeightPush:
    """Owns the transport that carries weights to the engines."""

    def __init__(
        self,
        transport: str | WeightTransport | None,
        reject_non_finite: bool,
        own_host: Callable[[], str],
        engine: str | None = None,
    ) -> None:
        """Create the transport. The arguments and errors are those of `transport_of`."""
        self._transport_of = partial(
            transport_of, reject_non_finite=reject_non_finite, own_host=own_host, engine=engine
        )
        self._transport = self._transport_of(transport)
        self._superseded: list[WeightTransport] = []  # engines may still fetch from them
        self._lock = asyncio.Lock()

    def use(self, transport: str | WeightTransport) -> None:
        """Use `transport` for later updates. Any thread may call it. Raises ConfigError for an
        unknown name. The former transport keeps its committed weights until other full weights are
        committed."""
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
        """Publish and send the tensors, and await `update`, which makes the engines read them.

        `check` is awaited after earlier updates have ended. If it raises, nothing is published.
        After a successful `update` the weights are committed, so that engines that join later can
        fetch them. If `update` raises, the former weights are restored on the transport, and its
        error is raised. If only sending fails, the weights are committed, and the error of sending
        is raised: engines that lack them wait for the next push. Returns the report of `update`,
        with the seconds of the whole push.
        """
        async with self._lock:
            await check()
            start, transport = time.perf_counter(), self._transport
            source = await asyncio.to_thread(transport.publish, named_tensors)
            sending = asyncio.ensure_future(asyncio.to_thread(_send, transport, source))
            try:
                report = await update(source)
            except BaseException as error:  # a cancelled update is rolled back, too
                # Rolling back also ends a send that no engine will receive.
                await asyncio.to_thread(transport.roll_back)
                fault = await sending
                if fault is not None:
                    raise error from fault
                raise
            fault = await sending
            # In a thread: returning gigabytes to the system would block streams.
            await asyncio.to_thread(self._commit, transport, source)
            if fault is not None:  # engines that receive weights in their commit lack them
                raise fault
            return replace(report, seconds=time.perf_counter() - start)

    def _commit(self, transport: WeightTransport, source: WeightsSource) -> None:
        """Commit, and close the transports that full weights have made superfluous."""
        transport.commit()
        if source.stands_alone:
            superseded, self._superseded = self._superseded, []
            for each in superseded:
                if each is transport:  # `use` was called during the push
                    self._superseded.append(each)
                else:
                    each.close()

    async def close(self) -> None:
        """Close all transports, which releases their weights. Before that, wait up to PUBLISH_S
        seconds for a running update, which rolls back by itself."""
        try:
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._lock.acquire(), PUBLISH_S)
                self._lock.release()
        finally:
            for transport in (*self._superseded, self._transport):
                await asyncio.to_thread(transport.close)


def _send(transport: WeightTransport, source: WeightsSource) -> WeightUpdateError | None:
    """Send the weights. Returns the error if sending fails; the engines report it as well."""
    try:
        transport.send(source)
    except WeightUpdateError as fault:
        _logger.warning("sending weights failed: %s", fault)
        return fault
    return None
