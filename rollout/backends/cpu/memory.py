"""Buffers of the host, dropped or given back in place, and an arena for offloaded bytes."""

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
    """Implements `MemoryBackend`. Memory goes back once the caller has dropped its own views, too.

    Each buffer is a mapping of its own, so that the system gets the memory at once.
    """

    has_stable_addresses = False

    def __init__(self) -> None:
        self._num_bytes: dict[str, int] = {}
        self._tensors: dict[str, Tensor] = {}

    def allocate(self, name: str, num_bytes: int) -> Tensor:
        """A flat uint8 tensor, zero-filled. Raises ConfigError if the memory is not to be had."""
        assert name not in self._num_bytes, f"buffer {name!r} exists"
        self._tensors[name] = map_bytes(name, num_bytes).tensor
        self._num_bytes[name] = num_bytes
        return self._tensors[name]

    def release(self, name: str) -> int:
        """Drop the buffer. Returns its bytes, 0 if it was released already."""
        if self._tensors.pop(name, None) is None:
            return 0
        trim_heap()
        return self._num_bytes[name]

    def trim(self) -> None:
        """Nothing: `release` has done it."""

    def restore(self, name: str) -> Tensor:
        """The buffer, allocated anew if it was released; its address may differ."""
        if name not in self._tensors:
            self._tensors[name] = map_bytes(name, self._num_bytes[name]).tensor
        return self._tensors[name]


class ReservedMemory:
    """Implements `MemoryBackend` with one anonymous mapping per buffer, kept for good.

    Release hands all pages to the system with madvise(MADV_DONTNEED), whoever still holds a view:
    the addresses stay valid and read as zero, and a page comes back when it is touched.
    """

    has_stable_addresses = True

    def __init__(self) -> None:
        """Raises ConfigError on a system that cannot take pages and keep their addresses."""
        if not frees_pages_in_place():
            raise ConfigError(
                "memory_kind='reserved' needs Linux, whose madvise takes pages and keeps their "
                "addresses; use memory_kind='device', with static_kv_memory_pointers=False or "
                "kv_cache_management_mode='persist'"
            )
        self._mappings: dict[str, Mapping] = {}

    def allocate(self, name: str, num_bytes: int) -> Tensor:
        """A flat uint8 tensor, zero-filled. Raises ConfigError if there is no address space."""
        assert name not in self._mappings, f"buffer {name!r} exists"
        self._mappings[name] = map_bytes(name, num_bytes)
        return self._mappings[name].tensor

    def release(self, name: str) -> int:
        """Give the buffer's pages back. Returns its bytes, whether or not they had been touched."""
        mapping = self._mappings[name]
        num_bytes = mapping.give_back(0, mapping.tensor.numel())
        trim_heap()
        return num_bytes

    def trim(self) -> None:
        """Nothing: `release` has done it."""

    def restore(self, name: str) -> Tensor:
        """The same tensor; its pages appear as they are touched."""
        return self._mappings[name].tensor


class MappedHostArena:
    """Implements `HostArena` with an anonymous mapping, which goes when its views are gone."""

    def __init__(self) -> None:
        self._mapping: Mapping | None = None

    def reserve(self, num_bytes: int) -> Tensor:
        """A flat uint8 view of exactly `num_bytes`; earlier contents are lost if it has to grow.

        Raises ConfigError if the memory is not to be had.
        """
        if num_bytes > self.num_bytes or self._mapping is None:
            self._mapping = None  # before the new mapping is made: the two never exist together
            self._mapping = map_bytes("host arena", num_bytes)
        return self._mapping.tensor[:num_bytes]

    @property
    def num_bytes(self) -> int:
        """Bytes the arena can hold without growing."""
        return 0 if self._mapping is None else self._mapping.tensor.numel()

    def discard(self, start: int, end: int) -> int:
        """Free the whole pages in bytes [start, end); contents lost. Returns bytes freed."""
        return 0 if self._mapping is None else self._mapping.give_back(start, end)

    def release(self) -> int:
        """Free the arena. Returns bytes freed."""
        num_bytes = self.num_bytes
        self._mapping = None
        return num_bytes
