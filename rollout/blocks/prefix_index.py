"""PrefixIndex: finds the blocks whose KV a new request can share."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable, Iterator, Sequence
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


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class IndexedBlock:
    """One block in the index.

    spans: the weights version that wrote the KV of each of its positions.
    oldest_version: the oldest version in this block and in all blocks before it.
    generation: the block is found as long as this is the generation of the index.
    """

    block: int
    key: bytes
    spans: VersionSpans
    oldest_version: int
    generation: int


class BlockList:
    """Blocks in the order in which they were appended, as links between their ids. Block 0 is both
    ends of the list.

    The links are arrays: with a million blocks, hash tables would cost one more cache miss per
    operation.
    """

    def __init__(self, num_blocks: int) -> None:
        self._next = array("i", [-1]) * (num_blocks + 1)
        self._previous = array("i", [-1]) * (num_blocks + 1)
        self._next[0] = self._previous[0] = 0
        self.num_blocks = 0  # in the list

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

    def pop_first(self) -> int:
        """Remove the first block and return it. There must be one."""
        block = self._next[0]
        assert block, "the list is empty"
        self.remove(block)
        return block


class PrefixIndex:
    """Finds a block by the key of its contents.

    A block enters the index only after its predecessor in the same table. So each user of a block
    uses its predecessors too, and releases them after it, and the longest unused block never has a
    successor in the index: dropping blocks in this order drops leaves first. No operation takes
    longer for a larger index.

    `keeps_unused`: a block outlives its last user until its space is needed. `num_entries`: blocks
    that can be found. `unused`: blocks that are kept without a user, oldest release first.
    """

    def __init__(self, num_blocks: int, *, keeps_unused: bool) -> None:
        self.keeps_unused = keeps_unused
        self.num_entries = 0
        self.unused = BlockList(num_blocks)
        self._by_key: dict[bytes, IndexedBlock] = {}
        self._by_block: list[IndexedBlock | None] = [None] * (num_blocks + 1)
        self._generation = 0

    def entries(self) -> list[IndexedBlock]:
        """Return every block that has a key, also those that cannot be found any more."""
        return list(self._by_key.values())

    def entry_of(self, block: int) -> IndexedBlock | None:
        """Return the entry of a block; None if it has no key."""
        return self._by_block[block]

    def is_current(self, entry: IndexedBlock) -> bool:
        """Whether no new generation has begun since the block entered the index."""
        return entry.generation == self._generation

    def find(self, keys: Iterable[bytes], oldest_version: int | None) -> list[IndexedBlock]:
        """Return the entries of the longest indexed prefix. None of them has KV older than
        `oldest_version`.
        """
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
        """Index a computed block that has a user. True if it is in the index afterwards.

        Returns False, with nothing changed, if another block can be found under its key, or if its
        predecessor in the table (None for the first block) is not in the index. An unused block
        that cannot be found any more, or that holds KV older than `oldest_version`, loses its key
        to the new one.
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
        """A found block has one more user."""
        if block in self.unused:
            self.unused.remove(block)

    def release(self, block: int) -> bool:
        """The block's last user has left. Returns whether the block is kept for others to find.

        Otherwise it is not in the index any more.
        """
        entry = self._by_block[block]
        if entry is None:
            return False
        if self.keeps_unused and self.is_current(entry):
            self.unused.append(block)
            return True
        self._remove_key(entry)
        return False

    def drop_oldest(self) -> int:
        """Drop the longest unused block and return it. There must be one."""
        block = self.unused.pop_first()
        entry = self._by_block[block]
        if entry is not None:
            self._remove_key(entry)
        return block

    def start_generation(self) -> None:
        """From now on, only blocks that enter the index from now on are found. The others are
        dropped when they are released, or when their space is needed.
        """
        self._generation += 1
        self.num_entries = 0

    def _can_be_found(self, entry: IndexedBlock, oldest_version: int | None) -> bool:
        return self.is_current(entry) and (
            oldest_version is None or entry.oldest_version >= oldest_version
        )

    def _remove_key(self, entry: IndexedBlock) -> None:
        """The block has no key any more. An unused block stays in the list of unused blocks."""
        del self._by_key[entry.key]
        self._by_block[entry.block] = None
        self.num_entries -= self.is_current(entry)
