"""WeightTransport: the trainer's side of a push; KeptTransport: a base of transports that keep it.

`publish` begins a push and returns the source from which engines fetch the tensors. While the
coordinator asks the engines to stage them, `send` runs. When all engines have answered, `commit`
follows, or `roll_back` if an engine refused. WeightPush (`rollout.apis.weight_push`) calls these
methods. Implemented in `rollout.weights.transports`. The APIs in `rollout.apis` accept a
WeightTransport as `weight_transport`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from rollout.weights.source import WeightsSource
from rollout.weights.update import NamedTensors


class WeightTransport(Protocol):
    """Publishes weights to engines. Owns the committed weights and the weights of a running push.
    There is one push at a time. `publish` and `send` block while tensors are read, so WeightPush
    calls them in threads. A `roll_back` ends a running `send`."""

    @property
    def kind(self) -> str:
        """The `kind` of this transport's WeightsSources, by which engines choose how to fetch."""
        ...

    @property
    def committed(self) -> WeightsSource | None:
        """The source of the last committed weights; None before the first commit."""
        ...

    def publish(self, named_tensors: NamedTensors) -> WeightsSource:
        """Begin a push and return its source. The next calls are `send`, then `commit` or
        `roll_back`.

        `publish` or `send` reads the tensors once. The tensors must not change until the push has
        ended. Only A and B of an adapter are sent, and each engine merges them. The committed
        weights are kept. Raises WeightUpdateError for a tensor that cannot be read, for refused NaN
        or infinity, and if memory is lacking.
        """
        ...

    def send(self, source: WeightsSource) -> None:
        """Send the published tensors to the engines that were asked to stage them. No-op if engines
        fetch them from memory or files. Returns early after `roll_back`. Raises WeightUpdateError
        if a tensor cannot be read or sent."""
        ...

    def commit(self) -> None:
        """Make the published weights the committed ones, and release weights that no engine needs.
        No-op if nothing is published."""
        ...

    def roll_back(self) -> None:
        """Release the published weights, after engines refused them. No-op if nothing is
        published."""
        ...

    def close(self) -> None:
        """Release all weights. A second call does nothing."""
        ...


class Published(Protocol):
    """Published weights of a KeptTransport. Engines fetch them from `source`."""

    @property
    def source(self) -> WeightsSource: ...


P = TypeVar("P", bound=Published)


class KeptTransport(Generic[P]):
    """Base of a WeightTransport, without `kind` and `publish`, whose weights stay for engines to
    fetch.

    A KeptTransport keeps the last committed weights and the weights of a running push. It also
    keeps the weights on which a committed adapter or delta builds, because engines that join later
    need them. A commit of weights that build on nothing releases all earlier weights.
    """

    def __init__(self, release: Callable[[P], object]) -> None:
        """`release` is called once with the weights of each push that are no longer needed."""
        self._release = release
        self._committed: P | None = None
        self._below: list[P] = []  # the weights on which the committed ones build
        self._pending: P | None = None

    @property
    def committed(self) -> WeightsSource | None:
        """The source of the last committed weights; None before the first commit."""
        return None if self._committed is None else self._committed.source

    def _begin(self, published: P) -> WeightsSource:
        """Keep the weights of a new push and return their source. No other push may be running."""
        assert self._pending is None
        self._pending = published
        return published.source

    def send(self, source: WeightsSource) -> None:
        """No-op: engines fetch the weights from where `publish` put them."""

    def commit(self) -> None:
        """Make the weights of the running push the committed ones, and release weights on which
        they do not build. No-op without a running push."""
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
        """Release the weights of the running push, if there is one."""
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
