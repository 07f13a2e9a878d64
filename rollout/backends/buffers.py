"""MemoryBackend and HostArena: where large buffers lie, and how their memory comes and goes.

Strips and CopyTokens: how the tokens of KV blocks lie in one, and who copies them. Shape letters: B
blocks, N bytes of one, K blocks to copy.
"""

from __future__ import annotations

from dataclasses import dataclass
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Strips:
    """A block of the KV cache as bytes: in each of its strips, one after the other, a part of each
    of its tokens. A strip is all that one layer has of a head, or more, and begins with token 0.
    """

    num_strips: int
    num_tokens: int
    bytes_per_token: int


class CopyTokens(Protocol):
    """Copies the first tokens of some blocks of a KV cache to others."""

    def __call__(
        self, pool_BN: Tensor, source_K: Tensor, target_K: Tensor, length_K: Tensor, strips: Strips
    ) -> None:
        """`pool_BN`: bytes of B blocks. Copy `length_K` tokens of blocks `source_K` to `target_K`,
        int64 on its device; no block is both."""
        ...
