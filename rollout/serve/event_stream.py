"""EventStream: a response of server-sent events, by which generation routes stream replies.

Used by `rollout.serve.openai.reply` and `rollout.serve.sglang.generate`. It writes to the client's
connection.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any

import msgspec
from aiohttp import web

from rollout.serve.errors import ApiError, ErrorForm
from rollout.serve.responses import api_error_of

_logger = logging.getLogger(__name__)
_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",  # proxies forward each event at once
}
_CHECKS_PER_TIMEOUT = 4


class EventStream:
    """A response of server-sent events. Use it as an async context manager. The first event also
    sends the headers, so an earlier error can still be answered with an HTTP status. A client that
    reads nothing for `stalled_timeout_s` seconds is disconnected, which cancels its handler."""

    def __init__(self, request: web.Request, stalled_timeout_s: float) -> None:
        self._request, self._timeout_s = request, stalled_timeout_s
        self._response = web.StreamResponse(headers=_HEADERS)
        self._encoder = msgspec.json.Encoder()
        self._writing_since: float | None = None
        self._timer: asyncio.TimerHandle | None = None

    async def __aenter__(self) -> EventStream:
        return self

    async def __aexit__(self, *exception: object) -> None:
        if self._timer is not None:
            self._timer.cancel()

    @property
    def has_begun(self) -> bool:
        """Return whether the headers were sent."""
        return self._response.prepared

    async def send(self, *events: Any) -> None:
        """Send each event as JSON, all in one write. Waits while the client reads slowly."""
        encode = self._encoder.encode
        await self._write(b"".join(b"data: %b\n\n" % encode(event) for event in events))

    async def send_error(self, fault: Exception, form: ErrorForm) -> None:
        """Send the error `fault` as an event. `form` makes its JSON. Raises `fault` if no event was
        sent before, or if the client has disconnected (ConnectionError)."""
        if not self.has_begun or isinstance(fault, ConnectionError):
            raise fault
        error = api_error_of(fault)
        if error is None:
            _logger.error("a stream failed", exc_info=fault)
            error = ApiError(500, f"the server failed: {type(fault).__name__}")
        await self.send(form(error))

    async def end(self) -> web.StreamResponse:
        """Send the last event, [DONE], and return the response."""
        await self._write(b"data: [DONE]\n\n")
        await self._response.write_eof()
        return self._response

    async def _write(self, piece: bytes) -> None:
        if not self._response.prepared:
            await self._response.prepare(self._request)
            self._watch()
        self._writing_since = time.monotonic()
        await self._response.write(piece)
        self._writing_since = None

    def _watch(self) -> None:
        """Disconnect a client that has read nothing for `stalled_timeout_s`. Else schedule the next
        check."""
        since, transport = self._writing_since, self._request.transport
        if since is not None and time.monotonic() - since > self._timeout_s:
            if transport is not None:
                transport.abort()
            return
        self._timer = asyncio.get_running_loop().call_later(
            self._timeout_s / _CHECKS_PER_TIMEOUT, self._watch
        )
