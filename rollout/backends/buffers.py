"""MemoryBackend and HostArena: where large buffers lie, and how their memory comes and goes."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class MemoryBackend(Protocol):
    """Reserves named buffers of bytes, gives their memory back, and brings it again."""

    has_stable_addresses: bool

    def allocate(self, name: str, num_bytes: int) -> Tensor:
        """A flat uint8 tensor, zero-filled. Raises ConfigError if the memory is not to be had."""
        ...

    def release(self, name: str) -> int:
        """Give the buffer's memory back; contents are lost, also if this raises: `restore` it then.
        Returns bytes released, which the system has after `trim`."""
        ...

    def restore(self, name: str) -> Tensor:
        """The buffer again, contents undefined; at the same address if `has_stable_addresses`."""
        ...

    def trim(self) -> None:
        """Give the system what allocators keep for later, released buffers among it."""
        ...


class HostArena(Protocol):
    """One reusable host buffer for offloaded bytes (pinned where a device copies from it)."""

    def reserve(self, num_bytes: int) -> Tensor:
        """A flat uint8 view of exactly `num_bytes`; grows the arena when it is too small."""
        ...

    @property
    def num_bytes(self) -> int:
        """Bytes the arena holds now."""
        ...

    def discard(self, start: int, end: int) -> int:
        """Free what can be freed of bytes [start, end); contents lost. Returns bytes freed."""
        ...

    def release(self) -> int:
        """Free the arena. Returns bytes freed."""
        ...
