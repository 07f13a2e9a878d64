"""ReservedMemory: CPU buffers that give their pages back and keep their addresses."""

from __future__ import annotations

from torch import Tensor

from rollout.backends.memory.mapping import (
    Mapping,
    frees_pages_in_place,
    map_bytes,
    trim_heap,
)
from rollout.errors import ConfigError


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
