"""Protocols of large buffers: MemoryBackend and HostArena allocate, CopyTokens copies KV tokens.

Used by the KV cache (rollout/worker/kv_cache.py) and weight memory (rollout/weights/memory.py) to
release memory at a suspend and restore it at a resume. Shape letters: B blocks, N bytes of a block,
K blocks to copy.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


class MemoryBackend(Protocol):
    """Allocates named buffers of bytes, releases their memory to the system, and restores it."""

    has_stable_addresses: bool

    def allocate(self, name: str, num_bytes: int) -> Tensor:
        """Return a new flat uint8 tensor, zero-filled. Raises ConfigError if memory is short."""
        ...

    def release(self, name: str) -> int:
        """Release the buffer's memory and return its bytes; the system gets them after `trim`.

        Contents are lost, also if this raises; call `restore` then.
        """
        ...

    def restore(self, name: str) -> Tensor:
        """Return the buffer with memory again, contents undefined.

        Its address is the same if `has_stable_addresses`.
        """
        ...

    def trim(self) -> None:
        """Return unused memory that allocators cache, such as released buffers, to the system."""
        ...


class HostArena(Protocol):
    """One reusable host buffer for offloaded bytes (pinned where a device copies from it)."""

    def reserve(self, num_bytes: int) -> Tensor:
        """Return a flat uint8 view of exactly `num_bytes`; grow the arena if it is too small."""
        ...

    @property
    def num_bytes(self) -> int:
        """Bytes the arena holds now."""
        ...

    def discard(self, start: int, end: int) -> int:
        """Free as much of bytes [start, end) as possible; contents are lost. Returns bytes."""
        ...

    def release(self) -> int:
        """Free the arena. Returns bytes freed."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Strips:
    """The layout of a KV cache block as bytes, in `num_strips` strips one after the other.

    Each strip holds `bytes_per_token` bytes of each token, from token 0 on: one head's K or V in
    one layer, or more.
    """

    num_strips: int
    num_tokens: int
    bytes_per_token: int


class CopyTokens(Protocol):
    """Copies the first tokens of some blocks of a KV cache to others."""

    def __call__(
        self, pool_BN: Tensor, source_K: Tensor, target_K: Tensor, length_K: Tensor, strips: Strips
    ) -> None:
        """Copy the first `length_K` tokens of blocks `source_K` to blocks `target_K`.

        `pool_BN`: the bytes of B blocks. The others are int64 on its device. No block may be both
        source and target.
        """
        ...
