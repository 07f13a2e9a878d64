"""The HTTP requests of one server: limits, unanswered requests and counts.

`rollout.serve.server` makes these objects. Used by `rollout.serve.app` (limit, counts),
`rollout.serve.generation` (registers samples), `rollout.serve.control.pausing` (abort, wait), and
by handlers that abort requests or report numbers, through ServerState.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager

from prometheus_client import CollectorRegistry, Counter, Histogram

from rollout.coordinator.client.streams import RequestFuture
from rollout.serve.errors import ApiError

_RETRY_AFTER_S = 1


class RequestLimiter:
    """Limits how many requests generate at once (`num_running`) and how many wait
    (`num_waiting`)."""

    def __init__(self, *, max_running: int, max_waiting: int) -> None:
        self.num_running = self.num_waiting = 0
        self._free, self._max_waiting = asyncio.Semaphore(max_running), max_waiting
        self._messages: dict[str, str] = {}  # message of each `close`, by its `reason`
        self._is_idle = asyncio.Event()
        self._is_idle.set()

    def close(self, reason: str, message: str) -> None:
        """Answer new requests with 503 and `message` until `open` is called with the same
        `reason`."""
        self._messages[reason] = message

    def open(self, reason: str) -> None:
        """Undo the `close` with this `reason`. The limiter stays closed if another reason closed
        it, too."""
        self._messages.pop(reason, None)

    async def is_idle_within(self, seconds: float) -> bool:
        """Wait at most `seconds` for all requests to end. Return whether all of them ended."""
        if self._is_idle.is_set():
            return True
        try:
            await asyncio.wait_for(self._is_idle.wait(), seconds)
        except asyncio.TimeoutError:
            return False
        return True

    @asynccontextmanager
    async def slot(self) -> AsyncIterator[None]:
        """Wait for a slot and hold it during the block. Raises ApiError with 503 while the limiter
        is closed, and with 429 if too many requests wait."""
        for message in self._messages.values():
            raise ApiError(503, message, retry_after_s=_RETRY_AFTER_S)
        if self._free.locked() and self.num_waiting >= self._max_waiting:
            raise ApiError(
                429,
                f"{self.num_running} requests run and {self.num_waiting} wait; try again later",
                retry_after_s=_RETRY_AFTER_S,
            )
        self.num_waiting += 1
        self._is_idle.clear()
        is_running = False
        try:
            await self._free.acquire()
            self.num_waiting -= 1
            self.num_running += 1
            is_running = True
            yield
        finally:
            if is_running:
                self.num_running -= 1
                self._free.release()
            else:
                self.num_waiting -= 1
            if not (self.num_running or self.num_waiting):
                self._is_idle.set()


class LiveRequests:
    """The samples of unanswered requests, by the request names that clients chose."""

    def __init__(
        self,
        abort_sample: Callable[[RequestFuture], None],
        *,
        on_end: Callable[[Sequence[RequestFuture]], None],
    ) -> None:
        """Start empty. `abort_sample` aborts one sample. `on_end` gets the samples of each request
        whose `of` block has ended, finished or not."""
        self._abort_sample, self._on_end = abort_sample, on_end
        self._samples: dict[int, tuple[str, Sequence[RequestFuture]]] = {}
        self._next_key = 0

    @property
    def num_requests(self) -> int:
        return len(self._samples)

    @property
    def num_unfinished_samples(self) -> int:
        return len(self._unfinished())

    async def all_ended(self) -> None:
        """Wait until no registered sample is unfinished, including samples that are registered
        meanwhile."""
        while unfinished := self._unfinished():
            await asyncio.wait(unfinished)

    def _unfinished(self) -> list[RequestFuture]:
        return [f for _, futures in self._samples.values() for f in futures if not f.done()]

    @contextmanager
    def of(self, name: str, samples: Sequence[RequestFuture]) -> Iterator[None]:
        """Register samples under `name` during the block. Several requests can have the same
        name."""
        key = self._next_key
        self._next_key += 1
        self._samples[key] = name, samples
        try:
            yield
        finally:
            del self._samples[key]
            self._on_end(samples)

    def abort(self, names: Sequence[str] | None = None) -> int:
        """Abort the unfinished samples of the named requests, or of all requests if `names` is
        None. The clients get the tokens so far. Returns the number of aborted samples. Ignores
        unknown names."""
        wanted = None if names is None else set(names)
        num_aborted = 0
        for name, futures in list(self._samples.values()):
            if wanted is not None and name not in wanted:
                continue
            for future in futures:
                if not future.done():
                    self._abort_sample(future)
                    num_aborted += 1
        return num_aborted


class RequestMetrics:
    """Counts and durations of answered requests, in a separate Prometheus registry."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._requests = Counter(
            "rollout_http_requests",
            "Answered requests",
            ("method", "path", "status"),
            registry=self.registry,
        )
        self._seconds = Histogram(
            "rollout_http_request_seconds",
            "Time from a request to the end of its answer",
            ("path",),
            registry=self.registry,
            buckets=(0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0),
        )

    def add(self, method: str, path: str, status: int, seconds: float) -> None:
        self._requests.labels(method, path, str(status)).inc()
        self._seconds.labels(path).observe(seconds)
