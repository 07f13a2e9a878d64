"""WeightTransport: the trainer's side of a push; KeptTransport: transports that keep the weights.

A push: `publish` reads the tensors and returns the source from which engines fetch them. The
coordinator asks the engines to stage them. `send` runs meanwhile, for transports whose tensors
travel only then. All engines stage and vote. Then `commit`, or `roll_back` if one of them refused.
Called by WeightPush.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from rollout.weights.source import WeightsSource
from rollout.weights.update import NamedTensors


class WeightTransport(Protocol):
    """Owns what engines fetch from: the committed weights, and the weights of a running push.

    One push at a time. `publish` and `send` block until the tensors are read, so threads call them.
    `roll_back` may be called while `send` runs, and ends it.
    """

    @property
    def kind(self) -> str:
        """The `kind` of its sources, which says how engines fetch."""
        ...

    @property
    def committed(self) -> WeightsSource | None:
        """The source of the last committed weights; None before the first commit."""
        ...

    def publish(self, named_tensors: NamedTensors) -> WeightsSource:
        """Begin a push: the next calls are `send`, then `commit` or `roll_back`.

        The tensors are read once, by `publish` or `send`, and must not change until the push has
        ended. Of an adapter only A and B travel: each engine merges them. Raises WeightUpdateError
        naming a tensor that cannot be read, or that has NaN or infinity where that is refused, and
        if there is no room. The committed weights stay.
        """
        ...

    def send(self, source: WeightsSource) -> None:
        """Send the published tensors to the engines that were asked to stage them.

        No-op where engines fetch by themselves. Raises WeightUpdateError, also if `roll_back` ends
        it.
        """
        ...

    def commit(self) -> None:
        """Keep the published weights for engines that come later, and release the earlier ones.

        No-op if nothing is published.
        """
        ...

    def roll_back(self) -> None:
        """Release the published weights, which were refused. No-op if nothing is published."""
        ...

    def close(self) -> None:
        """Release all weights. A second call does nothing."""
        ...


class Published(Protocol):
    """Weights that engines can fetch."""

    @property
    def source(self) -> WeightsSource: ...


P = TypeVar("P", bound=Published)


class KeptTransport(Generic[P]):
    """A WeightTransport, except `kind` and `publish`, of weights that engines fetch by themselves.

    It keeps the last committed weights, and the weights of a running push. The weights that an
    adapter or a delta builds on are kept, too, until other weights are committed that build on
    nothing: engines that come late need them.
    """

    def __init__(self, release: Callable[[P], object]) -> None:
        """`release` is called once for all weights that are no longer needed."""
        self._release = release
        self._committed: P | None = None
        self._below: list[P] = []  # what the committed weights build on
        self._pending: P | None = None

    @property
    def committed(self) -> WeightsSource | None:
        """The source of the last committed weights; None before the first commit."""
        return None if self._committed is None else self._committed.source

    def _begin(self, published: P) -> WeightsSource:
        """Keep the weights of a new push, which must be the only one. Returns their source."""
        assert self._pending is None
        self._pending = published
        return published.source

    def send(self, source: WeightsSource) -> None:
        """No-op: engines fetch by themselves."""

    def commit(self) -> None:
        """Keep the weights of the running push, and release what they do not build on."""
        if self._pending is None:
            return
        before, self._committed, self._pending = self._committed, self._pending, None
        source = self._committed.source
        if source.stands_alone:
            self._release_below()
            self._release_if_any(before)
        elif before is not None and before.source.lora is None:
            self._below.append(before)
        else:
            self._release_if_any(before)

    def roll_back(self) -> None:
        """Release the weights of the running push."""
        pending, self._pending = self._pending, None
        self._release_if_any(pending)

    def close(self) -> None:
        """Release all weights. A second call does nothing."""
        self.roll_back()
        committed, self._committed = self._committed, None
        self._release_if_any(committed)
        self._release_below()

    def _release_below(self) -> None:
        while self._below:
            self._release(self._below.pop())

    def _release_if_any(self, published: P | None) -> None:
        if published is not None:
            self._release(published)
