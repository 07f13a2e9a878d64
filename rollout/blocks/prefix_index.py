"""PrefixIndex: finds blocks whose KV a new request can share, by what was computed and under which
version.
"""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from rollout.version_spans import VersionSpans

ROOT_KEY = b""


def block_key(parent: bytes, version: int, tokens: Sequence[int]) -> bytes:
    """H(parent key, weights version, tokens): 128 bits of BLAKE2b.

    Cryptographic, so that a hit needs no comparison of tokens. The chain makes it the key of the
    whole prefix that ends with this block.
    """
    hasher = hashlib.blake2b(parent, digest_size=16)
    hasher.update(version.to_bytes(8, "little", signed=True))
    hasher.update(np.asarray(tokens, dtype=np.int32).tobytes())
    return hasher.digest()


@dataclass(slots=True, eq=False, kw_only=True)
class IndexedBlock:
    """One indexed block. `spans` say who wrote its KV, entry by entry."""

    block: int
    key: bytes
    parent: IndexedBlock | None
    spans: VersionSpans
    num_children: int = 0  # indexed successors
    released_at: int | None = None  # a running number; None while the block has a user


class PrefixIndex:
    """Key -> block. A block is indexed only behind its indexed parent in the same table.

    So whoever uses a block uses its ancestors too, and an unused entry has only unused successors.
    Unused entries are dropped leaves first, longest unused first.
    """

    def __init__(self) -> None:
        self._by_key: dict[bytes, IndexedBlock] = {}
        self._by_block: dict[int, IndexedBlock] = {}
        self._unused_leaves: list[tuple[int, bytes]] = []  # heap of (released_at, key), some stale
        self._num_releases = 0
        self.num_unused = 0

    def __len__(self) -> int:
        return len(self._by_key)

    def __contains__(self, block: int) -> bool:
        return block in self._by_block

    def find(self, keys: Iterable[bytes], oldest_version: int | None) -> list[IndexedBlock]:
        """Entries of the longest indexed prefix, none with KV older than `oldest_version`."""
        found = []
        for key in keys:
            entry = self._by_key.get(key)
            if entry is None or (oldest_version is not None and entry.spans.min() < oldest_version):
                break
            found.append(entry)
        return found

    def add(self, block: int, key: bytes, parent_block: int | None, spans: VersionSpans) -> bool:
        """Index a computed block that has a user. True if it is indexed now, or was already.

        False, with nothing changed, if another block has its key, or its predecessor in the table
        (None for the first) is not indexed.
        """
        known = self._by_key.get(key)
        if known is not None:
            return known.block == block
        parent = None if parent_block is None else self._by_block.get(parent_block)
        if parent is None and parent_block is not None:
            return False
        entry = IndexedBlock(block=block, key=key, parent=parent, spans=spans)
        self._by_key[key] = self._by_block[block] = entry
        if parent is not None:
            parent.num_children += 1
        return True

    def note_used(self, block: int) -> None:
        """The block has a user again."""
        entry = self._by_block[block]
        if entry.released_at is not None:
            entry.released_at = None
            self.num_unused -= 1

    def note_unused(self, block: int) -> None:
        """The block's last user left."""
        entry = self._by_block[block]
        assert entry.released_at is None, f"block {block} is unused already"
        entry.released_at = self._num_releases
        self._num_releases += 1
        self.num_unused += 1
        self._offer(entry)

    def drop(self, block: int) -> None:
        """Forget a block without indexed successors."""
        entry = self._by_block.pop(block)
        assert not entry.num_children, f"block {block} has indexed successors"
        del self._by_key[entry.key]
        if entry.released_at is not None:
            self.num_unused -= 1
        if entry.parent is not None:
            entry.parent.num_children -= 1
            self._offer(entry.parent)

    def drop_oldest(self) -> int:
        """Forget the longest unused leaf and return its block. There must be an unused entry."""
        while True:
            released_at, key = heapq.heappop(self._unused_leaves)
            entry = self._by_key.get(key)
            if entry is not None and entry.released_at == released_at and not entry.num_children:
                self.drop(entry.block)
                return entry.block

    def drop_unused(self) -> list[int]:
        """Forget every unused entry. Returns their blocks."""
        return [self.drop_oldest() for _ in range(self.num_unused)]

    def drop_older(self, version: int) -> list[int]:
        """Forget unused entries with KV older than `version` in them or before them.

        Returns their blocks. As long as they were known, no younger block could have their keys.
        """
        too_old: dict[int, IndexedBlock] = {}
        for entry in self._by_key.values():  # parents come first
            is_behind_old = entry.parent is not None and entry.parent.block in too_old
            if entry.released_at is not None and (is_behind_old or entry.spans.min() < version):
                too_old[entry.block] = entry
        blocks = list(reversed(too_old))
        for block in blocks:
            self.drop(block)
        return blocks

    def _offer(self, entry: IndexedBlock) -> None:
        if entry.released_at is not None and not entry.num_children:
            heapq.heappush(self._unused_leaves, (entry.released_at, entry.key))
