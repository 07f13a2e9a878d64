"""WeightTransport: what every kind of transport does on the trainer's side.

The way of a push: `publish` reads the tensors and says where engines find them; the engines are
ordered to take them, and `send` runs beside that order, for kinds whose tensors travel only then;
all engines stage them and vote; at last `commit`, or `drop` if any of them refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from rollout.weights.source import WeightsSource
from rollout.weights.update import NamedTensors


class WeightTransport(Protocol):
    """Owns what engines fetch from: the weights that are committed, and those of a running push.

    One push at a time. `publish` and `send` block for as long as the tensors take, so threads call
    them; `drop` may be called while `send` runs, and ends it.
    """

    @property
    def kind(self) -> str:
        """The kind of its sources, by which engines choose how to fetch."""
        ...

    @property
    def committed(self) -> WeightsSource | None:
        """The source of the last committed weights; None before the first commit."""
        ...

    def publish(self, named_tensors: NamedTensors) -> WeightsSource:
        """Take the tensors of a push; `send`, then `commit` or `drop` it next. Of an adapter only A
        and B travel: each engine merges them.

        The tensors are read once, by `publish` or by `send`, and must not change until the push has
        ended. Raises WeightUpdateError naming the tensor that cannot be read, or that holds NaN or
        infinity where that is refused, and if there is no room; the committed weights stay.
        """
        ...

    def send(self, source: WeightsSource) -> None:
        """Bring the published tensors to the engines that are ordered to take them. Does nothing
        where they fetch by themselves. Raises WeightUpdateError, also when `drop` ends it.
        """
        ...

    def commit(self) -> None:
        """The published weights are served: keep what engines that come later need, and release
        the weights before. Does nothing if nothing is published.
        """
        ...

    def drop(self) -> None:
        """The published weights were refused: release them. Does nothing if nothing is."""
        ...

    def close(self) -> None:
        """Release all weights. A second call does nothing."""
        ...


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
