"""WeightTransport: what every kind of transport does on the trainer's side.

The way of a push: `publish` reads the tensors and says where engines find them; the engines are
ordered to take them, and `send` runs beside that order, for kinds whose tensors travel only then;
all engines stage them and vote; at last `commit`, or `drop` if any of them refused.
"""

from __future__ import annotations

from typing import Protocol

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
