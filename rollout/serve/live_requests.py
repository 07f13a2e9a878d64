"""The HTTP requests of one server: how many may run, which are unanswered, and counts of all.

Used by the application (limit, counts), `Generation` (unanswered requests) and the control routes
(abort, drain). Nothing here calls an engine; LiveRequests calls the functions that it is given.
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
    """Limits the requests that generate at once and the requests that wait for a slot.

    num_running, num_waiting: requests that hold a slot now, and that wait for one.
    """

    def __init__(self, *, max_running: int, max_waiting: int) -> None:
        self.num_running = self.num_waiting = 0
        self._free, self._max_waiting = asyncio.Semaphore(max_running), max_waiting
        self._reasons: dict[str, str] = {}  # message of each `close`, by its `who`
        self._is_idle = asyncio.Event()
        self._is_idle.set()

    def close(self, who: str, message: str) -> None:
        """Answer new requests with 503 and `message` until `open` is called with the same `who`."""
        self._reasons[who] = message

    def open(self, who: str) -> None:
        """Undo `close` of the same `who`. Does nothing without one."""
        self._reasons.pop(who, None)

    async def is_idle_within(self, seconds: float) -> bool:
        """Wait until no request runs or waits. Returns whether that happened within `seconds`."""
        if self._is_idle.is_set():
            return True
        try:
            await asyncio.wait_for(self._is_idle.wait(), seconds)
        except asyncio.TimeoutError:
            return False
        return True

    @asynccontextmanager
    async def slot(self) -> AsyncIterator[None]:
        """Wait for a slot and hold it. Raises ApiError: 503 while closed, 429 if too many requests
        wait."""
        for message in self._reasons.values():
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
    """The unanswered requests, by the names that clients gave them."""

    def __init__(
        self,
        abort_sample: Callable[[RequestFuture], None],
        *,
        on_end: Callable[[Sequence[RequestFuture]], None],
    ) -> None:
        """abort_sample: aborts one sample. on_end: receives the samples of each request that is
        over, finished or not."""
        self._abort_sample, self._on_end = abort_sample, on_end
        self._samples: dict[int, tuple[str, Sequence[RequestFuture]]] = {}
        self._next_key = 0

    @property
    def num_requests(self) -> int:
        return len(self._samples)

    @property
    def num_samples(self) -> int:
        """Number of unfinished samples."""
        return len(self._unfinished())

    async def all_ended(self) -> None:
        """Wait until no sample is unfinished, also of requests that come meanwhile."""
        while unfinished := self._unfinished():
            await asyncio.wait(unfinished)

    def _unfinished(self) -> list[RequestFuture]:
        return [f for _, futures in self._samples.values() for f in futures if not f.done()]

    @contextmanager
    def of(self, name: str, samples: Sequence[RequestFuture]) -> Iterator[None]:
        """Register samples under `name`, which several requests may share, until the block ends."""
        key = self._next_key
        self._next_key += 1
        self._samples[key] = name, samples
        try:
            yield
        finally:
            del self._samples[key]
            self._on_end(samples)

    def abort(self, names: Sequence[str] | None = None) -> int:
        """Abort the requests of these names, None for all. Each is answered with its tokens so far.
        Returns the number of aborted samples. Unknown names are ignored.
        """
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
    """Counts and durations of answered requests, in a Prometheus registry of their own."""

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
        """Count an answered request. path: path of its route."""
        self._requests.labels(method, path, str(status)).inc()
        self._seconds.labels(path).observe(seconds)
