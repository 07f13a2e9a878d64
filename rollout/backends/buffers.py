"""Protocols of large buffers: MemoryBackend and HostArena allocate, CopyTokens copies KV tokens.

Used by `rollout.worker.kv_cache` and `rollout.weights.memory` to release memory at a suspend and
restore it at a resume. The CPU and CUDA backends implement the protocols. Shape letters: B blocks,
N bytes of a block, K blocks to copy.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


class MemoryBackend(Protocol):
    """Allocates named buffers of bytes, releases their memory to the system, and restores it.
    `has_stable_addresses` says whether a restored buffer has the same address as before."""

    has_stable_addresses: bool

    def allocate(self, name: str, num_bytes: int) -> Tensor:
        """Return a new flat uint8 tensor, zero-filled. Raises ConfigError if memory is short."""
        ...

    def release(self, name: str) -> int:
        """Release the buffer's memory and return the number of bytes released. The contents are
        lost. Some of the memory can return to the system only at `trim`. If this raises, the
        contents are lost, too, and `restore` must be called."""
        ...

    def restore(self, name: str) -> Tensor:
        """Return the buffer with memory again. Its contents are undefined."""
        ...

    def trim(self) -> None:
        """Return unused memory that allocators cache, such as released buffers, to the system."""
        ...


class HostArena(Protocol):
    """One reusable host buffer for offloaded bytes, pinned if a CUDA device copies from it."""

    def reserve(self, num_bytes: int) -> Tensor:
        """Return a flat uint8 view of the first `num_bytes`. Grows the arena if it is too small."""
        ...

    @property
    def num_bytes(self) -> int:
        """Number of bytes that the arena holds now."""
        ...

    def discard(self, start: int, end: int) -> int:
        """Free as much of bytes [start, end) as possible. Their contents are lost. Returns the
        number of bytes freed."""
        ...

    def release(self) -> int:
        """Free the arena. Returns the number of bytes freed."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Strips:
    """The byte layout of a KV cache block: `num_strips` strips, one after the other. A strip has
    `bytes_per_token` bytes of each of the block's `num_tokens` tokens, in order. These bytes are K
    or V of one or several heads in one layer."""

    num_strips: int
    num_tokens: int
    bytes_per_token: int


class CopyTokens(Protocol):
    """Copies the first tokens of some blocks of a KV cache to others."""

    def __call__(
        self, pool_BN: Tensor, source_K: Tensor, target_K: Tensor, length_K: Tensor, strips: Strips
    ) -> None:
        """Copy the first `length_K` tokens of blocks `source_K` to blocks `target_K`. `pool_BN` is
        uint8, the bytes of all B blocks. The [K] tensors are int64 on the pool's device. No block
        may be both source and target."""
        ...
