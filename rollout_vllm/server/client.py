"""VllmServer: a client of the HTTP routes of `vllm serve`. A thread of its own reads the streams.

`rollout_vllm.server.engine` makes it. The scheduler, the pipeline and the executor use it.
"""

from __future__ import annotations

import asyncio
import json
import logging
import queue
import threading
from collections.abc import AsyncIterator, Coroutine, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

from rollout.errors import LockstepError, RolloutError
from rollout.extras import extra_needed

_logger = logging.getLogger(__name__)
_T = TypeVar("_T")
_POLL_S = 1.0  # between two questions for the version of the weights
_SHOWN = 300  # characters of a reply in a message


class ServerRefusalError(RolloutError):
    """The server has answered with an HTTP status of 400 or more. `status`: this status."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """New tokens of a stream, or its end.

    attempt: the id with which the stream was started. choice: the entry of `choices` as the server
    has sent it; None if the stream ends by `error`. error: ServerRefusalError if the server refuses
    this request, LockstepError if the server does not answer.
    """

    attempt: str
    choice: Mapping[str, Any] | None = None
    error: RolloutError | None = None


class VllmServer:
    """A client of one server. One thread calls the methods; any thread may use `call`.

    expected_label: the name of the served weights, which the server must report from now on; None
    while they change, and before it is set. A thread asks the server for the name each second: a
    server that has another one was restarted, or was updated by somebody else. failure: the reason
    why the server must not be used any more, or None. is_foreign: whether the reason is other
    weights than this engine's.
    """

    def __init__(self, url: str, *, api_key: str | None, timeout_s: float) -> None:
        """`timeout_s`: seconds without an answer after which the server counts as dead."""
        with extra_needed("serve", "engine='vllm-server'"):
            import aiohttp
        self.url, self._timeout_s = url.rstrip("/"), timeout_s
        self._headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        self._aiohttp = aiohttp
        self._chunks: queue.SimpleQueue[Chunk] = queue.SimpleQueue()
        self._streams: dict[str, asyncio.Task[None]] = {}
        self.expected_label: str | None = None
        self.failure: LockstepError | None = None
        self.is_foreign = False
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="vllm-server")
        self._thread.daemon = True
        self._thread.start()
        self._session = self._submit(self._new_session()).result()
        self._monitor = self._submit(self._watch())

    def close(self) -> None:
        """End all streams and the thread. May be called again."""
        if self._loop.is_closed():
            return
        self._submit(self._end()).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _submit(self, work: Coroutine[Any, Any, _T]) -> Future[_T]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    async def _new_session(self) -> Any:
        connector = self._aiohttp.TCPConnector(limit=0)
        timeout = self._aiohttp.ClientTimeout(total=None, sock_connect=self._timeout_s)
        return self._aiohttp.ClientSession(
            connector=connector, timeout=timeout, headers=self._headers
        )

    async def _end(self) -> None:
        own = asyncio.current_task()
        tasks = [task for task in asyncio.all_tasks() if task is not own]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._session.close()

    # ---- calls

    def call(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        *,
        timeout_s: float | None = None,
    ) -> Any:
        """Return the reply's JSON, None if it is empty.

        Raises ServerRefusalError for a status of 400 or more, and LockstepError without an answer
        within `timeout_s` (None: the server's).
        """
        return self._submit(self._call(method, path, body, timeout_s)).result()

    async def _call(
        self, method: str, path: str, body: Mapping[str, Any] | None, timeout_s: float | None
    ) -> Any:
        seconds = self._timeout_s if timeout_s is None else timeout_s
        timeout = self._aiohttp.ClientTimeout(total=seconds)
        request = self._session.request(method, self.url + path, json=body, timeout=timeout)
        try:
            async with request as reply:
                text = await reply.text()
        except (OSError, self._aiohttp.ClientError, asyncio.TimeoutError) as error:
            raise self._dead(path, error, seconds) from error
        if reply.status >= 400:
            raise self._refusal(path, reply.status, text)
        return json.loads(text) if text else None

    def _dead(self, path: str, error: BaseException, seconds: float) -> LockstepError:
        is_late = isinstance(error, asyncio.TimeoutError)
        reason = f"no answer within {seconds:g} s" if is_late else error
        return LockstepError(
            f"the vLLM server at {self.url} does not answer {path} ({reason}); start it, then this "
            "engine"
        )

    def _refusal(self, path: str, status: int, text: str) -> ServerRefusalError:
        shown = " ".join(text.split())[:_SHOWN]
        return ServerRefusalError(
            status, f"the vLLM server at {self.url} refuses {path}: {status}, {shown}"
        )

    # ---- streams

    def generate(self, attempt: str, body: Mapping[str, Any]) -> None:
        """Start a stream of tokens. Its chunks are returned by `chunks` until one of them has a
        finish_reason or an error."""
        self._submit(self._begin(attempt, body))

    async def _begin(self, attempt: str, body: Mapping[str, Any]) -> None:
        self._streams[attempt] = asyncio.ensure_future(self._read(attempt, body))

    def abort(self, *attempts: str) -> None:
        """Ask the server to end streams. Their last chunks follow."""
        self._submit(self._abort(attempts))

    async def _abort(self, attempts: tuple[str, ...]) -> None:
        # The server prefixes the ids of this route's requests.
        body = {"request_ids": [f"generate-tokens-{attempt}" for attempt in attempts]}
        try:
            await self._call("POST", "/inference/v1/abort_requests", body, None)
        except RolloutError as error:  # the streams tell
            _logger.warning("%s", error)

    def chunks(self, wait_s: float) -> list[Chunk]:
        """Return the chunks that have arrived. Waits up to `wait_s` seconds for the first one."""
        found = []
        try:
            found.append(self._chunks.get(timeout=wait_s) if wait_s else self._chunks.get_nowait())
            while True:
                found.append(self._chunks.get_nowait())
        except queue.Empty:
            return found

    async def _read(self, attempt: str, body: Mapping[str, Any]) -> None:
        path = "/inference/v1/generate"
        error: RolloutError | None = None
        try:
            async with self._session.post(self.url + path, json=body) as reply:
                if reply.status >= 400:
                    error = self._refusal(path, reply.status, await reply.text())
                    return
                async for message in _messages(reply.content.iter_any()):
                    if "error" in message:
                        error = self._refusal(path, 500, json.dumps(message["error"]))
                        return
                    for choice in message["choices"]:
                        self._chunks.put(Chunk(attempt=attempt, choice=choice))
                        if choice["finish_reason"] is not None:
                            return
            error = self._dead(path, EOFError("the stream has ended early"), self._timeout_s)
        except (OSError, self._aiohttp.ClientError, asyncio.TimeoutError, ValueError) as fault:
            error = self._dead(path, fault, self._timeout_s)
        finally:
            del self._streams[attempt]
            if error is not None:
                self._chunks.put(Chunk(attempt=attempt, error=error))

    # ---- the server's health

    async def _watch(self) -> None:
        while self.failure is None:
            await asyncio.sleep(_POLL_S)
            label = self.expected_label
            if label is None:
                continue
            try:
                reply = await self._call("GET", "/weight_info", None, None)
            except RolloutError as error:
                if self.expected_label == label:
                    self.failure = LockstepError(str(error))
                continue
            if reply["weight_version"] != label and self.expected_label == label:
                self.report_foreign(reply["weight_version"])

    def report_foreign(self, found: object) -> None:
        """Set `failure`: the server has named `found` as its weights, not `expected_label`."""
        self.is_foreign = True
        self.failure = LockstepError(
            f"the vLLM server at {self.url} serves the weights {found!r}, not "
            f"{self.expected_label!r} of this engine: it was restarted, or somebody else has "
            "updated it; start this engine again"
        )


async def _messages(parts: AsyncIterator[bytes]) -> AsyncIterator[Any]:
    """Yield the JSON objects of a stream of server-sent events, up to [DONE]."""
    held = b""
    async for part in parts:
        *lines, held = (held + part).split(b"\n")
        for line in lines:
            if line.startswith(b"data: ") and line != b"data: [DONE]":
                yield json.loads(line[6:])
