"""KeptWeights: the published weights that a transport holds, from a push to those that follow."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from rollout.coordinator.protocol.weights_source import WeightsSource


class Published(Protocol):
    """Weights where engines can fetch them."""

    @property
    def source(self) -> WeightsSource: ...


P = TypeVar("P", bound=Published)


class KeptWeights(Generic[P]):
    """The last committed weights, and those of a running push.

    While adapters are committed, the full weights below them stay for engines that come late.
    """

    def __init__(self, release: Callable[[P], object]) -> None:
        """`release` is called once for all weights that are needed no longer."""
        self._release = release
        self._committed: P | None = None
        self._base: P | None = None  # the full weights that a committed adapter belongs to
        self._pending: P | None = None

    @property
    def committed(self) -> WeightsSource | None:
        """The source of the last committed weights; None before the first commit."""
        return None if self._committed is None else self._committed.source

    def begin(self, published: P) -> None:
        """These are the weights of the running push. There must be no other."""
        assert self._pending is None
        self._pending = published

    def commit(self) -> None:
        """Keep the weights of the running push, and release the earlier ones."""
        if self._pending is None:
            return
        before, self._committed, self._pending = self._committed, self._pending, None
        if self._committed.source.lora is None:
            self._release_if_any(self._base)
            self._base = None
        elif before is not None and before.source.lora is None:
            self._base, before = before, None
        self._release_if_any(before)

    def drop(self) -> None:
        """Release the weights of the running push."""
        pending, self._pending = self._pending, None
        self._release_if_any(pending)

    def clear(self) -> None:
        """Release all weights."""
        self.drop()
        committed, base, self._committed, self._base = self._committed, self._base, None, None
        self._release_if_any(committed)
        self._release_if_any(base)

    def _release_if_any(self, published: P | None) -> None:
        if published is not None:
            self._release(published)
