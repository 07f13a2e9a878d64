"""KeptTransport: what a transport does whose weights lie where engines fetch them by themselves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from rollout.weights.source import WeightsSource


class Published(Protocol):
    """Weights where engines can fetch them."""

    @property
    def source(self) -> WeightsSource: ...


P = TypeVar("P", bound=Published)


class KeptTransport(Generic[P]):
    """A WeightTransport but for `kind` and `publish`, which ends with `_begin`.

    It holds the last committed weights, and those of a running push. What adapters and deltas build
    on stays below them, for engines that come late, until other weights are committed whole.
    """

    def __init__(self, release: Callable[[P], object]) -> None:
        """`release` is called once for all weights that are needed no longer."""
        self._release = release
        self._committed: P | None = None
        self._below: list[P] = []  # what the committed weights build on
        self._pending: P | None = None

    @property
    def committed(self) -> WeightsSource | None:
        """The source of the last committed weights; None before the first commit."""
        return None if self._committed is None else self._committed.source

    def _begin(self, published: P) -> WeightsSource:
        """These are the weights of the running push, and the only ones. Returns their source."""
        assert self._pending is None
        self._pending = published
        return published.source

    def send(self, source: WeightsSource) -> None:
        """Do nothing: engines fetch by themselves."""

    def commit(self) -> None:
        """Keep the weights of the running push, and release the earlier ones."""
        if self._pending is None:
            return
        before, self._committed, self._pending = self._committed, self._pending, None
        source = self._committed.source
        if source.lora is None and not source.builds_on:
            self._release_below()
            self._release_if_any(before)
        elif before is not None and before.source.lora is None:
            self._below.append(before)
        else:
            self._release_if_any(before)

    def drop(self) -> None:
        """Release the weights of the running push."""
        pending, self._pending = self._pending, None
        self._release_if_any(pending)

    def close(self) -> None:
        """Release all weights. A second call does nothing."""
        self.drop()
        committed, self._committed = self._committed, None
        self._release_if_any(committed)
        self._release_below()

    def _release_below(self) -> None:
        while self._below:
            self._release(self._below.pop())

    def _release_if_any(self, published: P | None) -> None:
        if published is not None:
            self._release(published)
