"""PrefixIndex: finds the blocks whose KV a new request can share, by hashes of their tokens.

`rollout.blocks.kv_cache_manager` owns it. `rollout.scheduling.scheduler` uses `root_key`, and
`rollout.scheduling.integrity` reads the index.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from rollout.version_spans import VersionSpans

ROOT_KEY = b""


def root_key(salt: str | None) -> bytes:
    """Return the parent key of a request's first block. Prefixes with different salts never match.
    `salt` is the request's `cache_salt`."""
    if salt is None:
        return ROOT_KEY
    return hashlib.blake2b(salt.encode(), digest_size=16, person=b"cache salt").digest()


def block_key(parent: bytes, version: int, tokens: Sequence[int]) -> bytes:
    """Return the key of a block: H(parent key, weights version, tokens), 128 bits of BLAKE2b. The
    key stands for the whole prefix that ends with this block, because it includes the parent key.
    The hash is cryptographic, so equal keys need no comparison of tokens."""
    hasher = hashlib.blake2b(parent, digest_size=16)
    hasher.update(version.to_bytes(8, "little", signed=True))
    hasher.update(np.asarray(tokens, dtype=np.int32).tobytes())
    return hasher.digest()


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class IndexedBlock:
    """A block in the index.

    spans: the weights version that wrote the KV of each position.
    oldest_version: the oldest version in this block and in all blocks before it.
    generation: the index's generation when the block was added. The block does not match in later
        generations.
    """

    block: int
    key: bytes
    spans: VersionSpans
    oldest_version: int
    generation: int


class BlockList:
    """A doubly linked list of blocks in the order of appending. Each operation takes O(1)."""

    def __init__(self, num_blocks: int) -> None:
        # Arrays over block ids, whose entry 0 is both ends of the list. With a million blocks,
        # hash tables would cost one more cache miss per operation.
        self._next = array("i", [-1]) * (num_blocks + 1)
        self._previous = array("i", [-1]) * (num_blocks + 1)
        self._next[0] = self._previous[0] = 0
        self.num_blocks = 0

    def __contains__(self, block: int) -> bool:
        return self._next[block] >= 0

    def __iter__(self) -> Iterator[int]:
        block = self._next[0]
        while block:
            yield block
            block = self._next[block]

    def append(self, block: int) -> None:
        """Add a block that is not in the list."""
        last = self._previous[0]
        self._next[last] = self._previous[0] = block
        self._previous[block], self._next[block] = last, 0
        self.num_blocks += 1

    def remove(self, block: int) -> None:
        """Remove a block that is in the list."""
        before, after = self._previous[block], self._next[block]
        self._next[before], self._previous[after] = after, before
        self._next[block] = -1
        self.num_blocks -= 1

    @property
    def first(self) -> int:
        """The block that was appended first; 0 if the list is empty."""
        return self._next[0]


class PrefixIndex:
    """Finds a block by the key of its contents.

    A block enters the index only after its predecessor in the same table. So each user of a block
    also uses its predecessors, and releases them after it. The block unused longest therefore has
    no successor in the index, and eviction in this order evicts leaves first. All operations except
    `entries` take the same time for every size of the index.

    keeps_unused: whether a block stays in the index after its last user, until its space is needed.
    num_entries: number of blocks that can be found.
    unused: the blocks without a user, oldest release first.
    num_dropped: number of blocks at the start of `unused` that can no longer be found.
    """

    def __init__(self, num_blocks: int, *, keeps_unused: bool) -> None:
        self.keeps_unused = keeps_unused
        # The keys of dropped blocks are removed when their space is needed: dropping takes O(1).
        self.num_entries = self.num_dropped = 0
        self.unused = BlockList(num_blocks)
        self._num_unused_entries = 0  # blocks counted in `num_entries` that have no user
        self._num_drops = 0
        # For each block the number of drops before its last user left.
        self._drops_before = array("i", [0]) * (num_blocks + 1)
        self._by_key: dict[bytes, IndexedBlock] = {}
        self._by_block: list[IndexedBlock | None] = [None] * (num_blocks + 1)
        self._generation = 0

    def entries(self) -> list[IndexedBlock]:
        """Return every block that has a key, including blocks that no longer match."""
        return list(self._by_key.values())

    def is_current(self, entry: IndexedBlock) -> bool:
        """Return whether the block is neither dropped nor of an earlier generation. Requests find
        such a block if its KV is not too old for them."""
        was_there = self._drops_before[entry.block] < self._num_drops
        is_dropped = was_there and entry.block in self.unused
        return entry.generation == self._generation and not is_dropped

    def find(self, keys: Iterable[bytes], oldest_version: int | None) -> list[IndexedBlock]:
        """Return the entries of the longest indexed prefix without KV older than `oldest_version`.
        `keys` are the keys of a request's blocks, first block first. `oldest_version` None allows
        KV of any age."""
        found = []
        for key in keys:
            entry = self._by_key.get(key)
            if entry is None or not self._can_be_found(entry, oldest_version):
                break
            found.append(entry)
        return found

    def add(
        self,
        block: int,
        key: bytes,
        predecessor: int | None,
        spans: VersionSpans,
        oldest_version: int | None,
    ) -> bool:
        """Index a computed block that has a user. Returns whether it is in the index afterwards.

        `predecessor` is the block before `block` in the table; None for the first block. If the
        predecessor is not in the index or not current, nothing is changed. If another block has the
        key, `block` takes it over only if the other block has no user and `find` would not return
        it for `oldest_version`.
        """
        known = self._by_key.get(key)
        if known is not None:
            if known.block == block:
                return True
            if known.block not in self.unused or self._can_be_found(known, oldest_version):
                return False
        oldest_written = spans.min()
        if predecessor is not None:
            before = self._by_block[predecessor]
            if before is None or not self.is_current(before):
                return False
            oldest_written = min(oldest_written, before.oldest_version)
        if known is not None:
            self._remove_key(known)
        self._by_key[key] = self._by_block[block] = IndexedBlock(
            block=block,
            key=key,
            spans=spans,
            oldest_version=oldest_written,
            generation=self._generation,
        )
        self.num_entries += 1
        return True

    def use(self, block: int) -> None:
        """Record that one more request uses a found block."""
        if block in self.unused:
            self.unused.remove(block)
            self._num_unused_entries -= 1

    def release(self, block: int) -> bool:
        """Record that the block's last user has left. Returns True if the block stays in the index
        as an unused block, False if it is free."""
        entry = self._by_block[block]
        if entry is None:
            return False
        if self.keeps_unused and self.is_current(entry):
            self.unused.append(block)
            self._drops_before[block] = self._num_drops
            self._num_unused_entries += 1
            return True
        self._remove_key(entry)
        return False

    def evict_oldest(self) -> int:
        """Remove the block unused longest from the index and return it. There must be one."""
        block = self.unused.first
        assert block, "every block has a user"
        entry = self._by_block[block]
        if entry is not None:
            self._remove_key(entry)
        self.unused.remove(block)
        if self.num_dropped:
            self.num_dropped -= 1
        return block

    def drop_unused(self) -> None:
        """Exclude all blocks that have no user now from later matches. O(1)."""
        self.num_entries -= self._num_unused_entries
        self._num_unused_entries = 0
        self.num_dropped = self.unused.num_blocks
        self._num_drops += 1

    def start_generation(self) -> None:
        """Exclude all blocks that are in the index now from later matches. O(1). Unused blocks are
        dropped. The other blocks leave the index with their last user."""
        self.drop_unused()
        self._generation += 1
        self.num_entries = 0

    def _can_be_found(self, entry: IndexedBlock, oldest_version: int | None) -> bool:
        return self.is_current(entry) and (
            oldest_version is None or entry.oldest_version >= oldest_version
        )

    def _remove_key(self, entry: IndexedBlock) -> None:
        """Remove the key of a block. An unused block stays in the list of unused blocks."""
        if self.is_current(entry):
            self.num_entries -= 1
            self._num_unused_entries -= entry.block in self.unused
        del self._by_key[entry.key]
        self._by_block[entry.block] = None
