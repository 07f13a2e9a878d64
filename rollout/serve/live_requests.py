"""LiveRequests: the unanswered requests of clients, by the names that clients gave them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rollout.coordinator.client.streams import RequestFuture


class LiveRequests:
    """`abort_sample` aborts a sample. `on_end` gets the samples of each request that is over,
    whether or not they have ended.
    """

    def __init__(
        self,
        abort_sample: Callable[[RequestFuture], None],
        *,
        on_end: Callable[[Sequence[RequestFuture]], None],
    ) -> None:
        self._abort_sample, self._on_end = abort_sample, on_end
        self._samples: dict[int, tuple[str, Sequence[RequestFuture]]] = {}
        self._next_key = 0

    @property
    def num_requests(self) -> int:
        return len(self._samples)

    @property
    def num_samples(self) -> int:
        """Samples that have not ended."""
        return len(self._unfinished())

    def _unfinished(self) -> list[RequestFuture]:
        return [f for _, futures in self._samples.values() for f in futures if not f.done()]

    async def all_ended(self) -> None:
        """Wait until no sample runs, those included that come meanwhile."""
        while unfinished := self._unfinished():
            await asyncio.wait(unfinished)

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
