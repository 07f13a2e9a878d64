"""SharedSource: the tensors of a weight update in memory that all ranks of an engine read.

Used by `rollout.tensor_parallel.executor`, which writes the memory, and by
`rollout.tensor_parallel.follower`, which opens it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain

from torch import Tensor

from rollout.parallel.shared_memory import Place, SharedTensors, write_shared
from rollout.weights.lora import LoraAdapter
from rollout.weights.update import NamedTensors, blaming, streamed

_BASE = "base: "  # prefix of the names of an adapter's base weights


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedSource:
    """Address and layout of shared memory with an update's tensors, which rank 0 sends the other
    ranks.

    `places`: place of each tensor in the memory, by name.
    `adapter`: the LoRA adapter without its tensors; None for full weights."""

    address: str
    places: Mapping[str, Place]
    adapter: LoraAdapter | None

    def open(self) -> NamedTensors:
        """Open the memory on another rank, and return the update. Raises WeightUpdateError."""
        return self.joined(SharedTensors(self.address, self.places))

    def joined(self, tensors: SharedTensors) -> NamedTensors:
        """Return `tensors`, or a LoraAdapter of them if the update is an adapter."""
        if self.adapter is None:
            return tensors
        base = {n.removeprefix(_BASE): t for n, t in tensors.items() if n.startswith(_BASE)}
        own = {n: tensor for n, tensor in tensors.items() if not n.startswith(_BASE)}
        return replace(self.adapter, tensors=own, base=base or None)


@contextmanager
def in_shared_memory(named_tensors: NamedTensors) -> Iterator[tuple[NamedTensors, SharedSource]]:
    """Copy an update to shared memory, unless it is already there. Yields the update in shared
    memory, and the SharedSource by which other ranks open it. Raises WeightUpdateError."""
    if isinstance(named_tensors, SharedTensors):
        address, places = named_tensors.address, named_tensors.places
        yield named_tensors, SharedSource(address=address, places=places, adapter=None)
        return
    adapter = named_tensors if isinstance(named_tensors, LoraAdapter) else None
    stream = streamed(named_tensors)
    try:
        with blaming("copying the weights for the other ranks"):
            shared = write_shared(chain(stream, _base_of(adapter)))
        empty = None if adapter is None else replace(adapter, tensors={}, base=None)
        source = SharedSource(address=shared.address, places=shared.places, adapter=empty)
        yield source.joined(shared), source
    finally:
        stream.drain()  # reading may be a collective: the trainer's other ranks wait in it


def read_along(named_tensors: NamedTensors) -> None:
    """Read all tensors of this rank's update, and drop them, while rank 0 copies its update. Ranks
    other than 0 call it, because reading may be a collective of the trainer's ranks. Raises
    WeightUpdateError."""
    adapter = named_tensors if isinstance(named_tensors, LoraAdapter) else None
    stream = streamed(named_tensors)
    try:
        with blaming("reading the weights along with rank 0"):
            deque(chain(stream, _base_of(adapter)), maxlen=0)
    finally:
        stream.drain()


def _base_of(adapter: LoraAdapter | None) -> Iterator[tuple[str, Tensor]]:
    """Yield an adapter's base weights, if it has any, with `_BASE` before their names."""
    if adapter is not None and adapter.base is not None:
        for name, tensor in streamed(adapter.base):
            yield _BASE + name, tensor
