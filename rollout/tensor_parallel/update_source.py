"""SharedSource: the tensors of a weight update in memory that all ranks of an engine read.

Used by TensorParallelExecutor, which writes them, and by Follower, which opens them.
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
    """Shared memory with the tensors of an update, as one rank sends it to another.

    `adapter` is the LoRA adapter that the tensors belong to, without them; None for full weights.
    """

    address: str
    places: Mapping[str, Place]
    adapter: LoraAdapter | None

    def open(self) -> NamedTensors:
        """Open the memory of another rank. Raises WeightUpdateError."""
        return self.joined(SharedTensors(self.address, self.places))

    def joined(self, tensors: SharedTensors) -> NamedTensors:
        """Return the update that `tensors` hold: tensors by name, or an adapter of them."""
        if self.adapter is None:
            return tensors
        base = {n.removeprefix(_BASE): t for n, t in tensors.items() if n.startswith(_BASE)}
        own = {n: tensor for n, tensor in tensors.items() if not n.startswith(_BASE)}
        return replace(self.adapter, tensors=own, base=base or None)


@contextmanager
def in_shared_memory(named_tensors: NamedTensors) -> Iterator[tuple[NamedTensors, SharedSource]]:
    """Copy an update to shared memory, unless it lies there already.

    Yields the update, which now lies there, and what other ranks need to open it. Raises
    WeightUpdateError.
    """
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
        stream.drain()  # a trainer's other ranks gather along, and must not wait


def read_along(named_tensors: NamedTensors) -> None:
    """Read an update as rank 0 does in `in_shared_memory`, and keep nothing.

    Reading may be a collective of the trainer's ranks. Raises WeightUpdateError.
    """
    adapter = named_tensors if isinstance(named_tensors, LoraAdapter) else None
    stream = streamed(named_tensors)
    try:
        with blaming("reading the weights along with rank 0"):
            deque(chain(stream, _base_of(adapter)), maxlen=0)
    finally:
        stream.drain()


def _base_of(adapter: LoraAdapter | None) -> Iterator[tuple[str, Tensor]]:
    """Yield an adapter's base weights, if it brings some, under names with a prefix."""
    if adapter is not None and adapter.base is not None:
        for name, tensor in streamed(adapter.base):
            yield _BASE + name, tensor
