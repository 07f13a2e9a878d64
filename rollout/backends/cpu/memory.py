"""The CPU's memory kinds "device" and "reserved", and its arena for offloaded bytes.

Created by `rollout.backends.cpu.backend`. `rollout.worker.kv_cache` and `rollout.weights.memory`
use them through the protocols of `rollout.backends.buffers`.
"""

from __future__ import annotations

from torch import Tensor

from rollout.backends.cpu.mapping import (
    Mapping,
    frees_pages_in_place,
    map_bytes,
    trim_heap,
)
from rollout.errors import ConfigError


class DeviceMemory:
    """`MemoryBackend` with a new mapping for each allocation. The system gets a released buffer's
    memory back when the caller has dropped all its views."""

    has_stable_addresses = False

    def __init__(self) -> None:
        self._num_bytes: dict[str, int] = {}
        self._tensors: dict[str, Tensor] = {}

    def allocate(self, name: str, num_bytes: int) -> Tensor:
        """Return a new flat uint8 tensor, zero-filled. Raises ConfigError if memory is short."""
        assert name not in self._num_bytes, f"buffer {name!r} exists"
        self._tensors[name] = map_bytes(name, num_bytes).tensor
        self._num_bytes[name] = num_bytes
        return self._tensors[name]

    def release(self, name: str) -> int:
        """Drop the buffer. Return its number of bytes; 0 if it was released already."""
        if self._tensors.pop(name, None) is None:
            return 0
        trim_heap()
        return self._num_bytes[name]

    def trim(self) -> None:
        """No-op: `release` already returned the memory."""

    def restore(self, name: str) -> Tensor:
        """Return the buffer. A released buffer is allocated anew, zero-filled, and its address can
        differ."""
        if name not in self._tensors:
            self._tensors[name] = map_bytes(name, self._num_bytes[name]).tensor
        return self._tensors[name]


class ReservedMemory:
    """`MemoryBackend` with one mapping per buffer for the buffer's whole life. `release` returns
    all pages to the system with madvise(MADV_DONTNEED). Views stay valid and read as zero. A page
    gets memory again when it is touched."""

    has_stable_addresses = True

    def __init__(self) -> None:
        """Raise ConfigError unless the system can free pages and keep their addresses."""
        if not frees_pages_in_place():
            raise ConfigError(
                "memory_kind='reserved' needs Linux, whose madvise frees pages and keeps their "
                "addresses; use memory_kind='device', with static_kv_memory_pointers=False or "
                "kv_cache_management_mode='persist'"
            )
        self._mappings: dict[str, Mapping] = {}

    def allocate(self, name: str, num_bytes: int) -> Tensor:
        """Return a new flat uint8 tensor, zero-filled. Raises ConfigError if it cannot be
        mapped."""
        assert name not in self._mappings, f"buffer {name!r} exists"
        self._mappings[name] = map_bytes(name, num_bytes)
        return self._mappings[name].tensor

    def release(self, name: str) -> int:
        """Return the buffer's pages to the system. Return the buffer's size in bytes, also if some
        pages had no memory."""
        mapping = self._mappings[name]
        num_bytes = mapping.free_pages(0, mapping.tensor.numel())
        trim_heap()
        return num_bytes

    def trim(self) -> None:
        """No-op: `release` already returned the memory."""

    def restore(self, name: str) -> Tensor:
        """Return the same tensor. Its pages get memory when they are touched."""
        return self._mappings[name].tensor


class MappedHostArena:
    """`HostArena` with an anonymous mapping, unmapped with its last view."""

    def __init__(self) -> None:
        self._mapping: Mapping | None = None

    def reserve(self, num_bytes: int) -> Tensor:
        """Return a flat uint8 view of the first `num_bytes`. Growing the arena loses its contents.
        Raises ConfigError if memory is short."""
        if num_bytes > self.num_bytes or self._mapping is None:
            self._mapping = None  # unmap first, so that the two never exist together
            self._mapping = map_bytes("host arena", num_bytes)
        return self._mapping.tensor[:num_bytes]

    @property
    def num_bytes(self) -> int:
        """Number of bytes that the arena can hold without growing."""
        return 0 if self._mapping is None else self._mapping.tensor.numel()

    def discard(self, start: int, end: int) -> int:
        """Free the whole pages in bytes [start, end). Their contents are lost. Returns the number
        of bytes freed."""
        return 0 if self._mapping is None else self._mapping.free_pages(start, end)

    def release(self) -> int:
        """Free the arena. Its memory is unmapped with its last view. Returns its number of
        bytes."""
        num_bytes = self.num_bytes
        self._mapping = None
        return num_bytes
