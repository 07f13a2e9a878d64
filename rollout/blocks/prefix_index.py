"""PrefixIndex: finds blocks whose KV a new request can share, by what was computed and under which
version.
"""

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
    """One indexed block. `spans` say who wrote its KV, entry by entry; `oldest_version` is the
    oldest in it or before it. It is found as long as the index has its `generation`.
    """

    block: int
    key: bytes
    spans: VersionSpans
    oldest_version: int
    generation: int


class BlockList:
    """Blocks in the order they were appended, as links between their ids; block 0 is both ends.

    Arrays, since with a million of blocks hash tables would cost a cache miss more per operation.
    """

    def __init__(self, num_blocks: int) -> None:
        self._next = array("i", [-1]) * (num_blocks + 1)
        self._previous = array("i", [-1]) * (num_blocks + 1)
        self._next[0] = self._previous[0] = 0
        self._num_listed = 0

    def __len__(self) -> int:
        return self._num_listed

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
        self._num_listed += 1

    def remove(self, block: int) -> None:
        """Take out a block that is in the list."""
        before, after = self._previous[block], self._next[block]
        self._next[before], self._previous[after] = after, before
        self._next[block] = -1
        self._num_listed -= 1

    def pop_first(self) -> int:
        """Take out the first block and return it. There must be one."""
        block = self._next[0]
        assert block, "the list is empty"
        self.remove(block)
        return block


class PrefixIndex:
    """Key -> block. A block is indexed only behind its indexed predecessor in the same table.

    So whoever uses a block uses its predecessors too and releases them after it, and the longest
    unused block never has an indexed successor: dropping in this order drops leaves first.
    No operation takes longer for a larger index, save to drop many blocks.
    """

    def __init__(self, num_blocks: int) -> None:
        self._by_key: dict[bytes, IndexedBlock] = {}
        self._by_block: list[IndexedBlock | None] = [None] * (num_blocks + 1)
        self._unused = BlockList(num_blocks)  # oldest release first
        self._generation = 0
        self._num_of_generation = 0

    def __len__(self) -> int:
        """Blocks that can be found."""
        return self._num_of_generation

    @property
    def num_unused(self) -> int:
        """Blocks kept without a user."""
        return len(self._unused)

    def find(self, keys: Iterable[bytes], oldest_version: int | None) -> list[IndexedBlock]:
        """Entries of the longest indexed prefix, none with KV older than `oldest_version`."""
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
        """Index a computed block that has a user. True if it is indexed now, or was already.

        False, with nothing changed, if another block can be found under its key, or its
        predecessor in the table (None for the first) is not indexed. A block that can be found no
        longer, or holds KV older than `oldest_version`, gives its key up.
        """
        known = self._by_key.get(key)
        if known is not None:
            if known.block == block:
                return True
            if known.block not in self._unused or self._can_be_found(known, oldest_version):
                return False
        oldest_written = spans.min()
        if predecessor is not None:
            before = self._by_block[predecessor]
            if before is None or before.generation != self._generation:
                return False
            oldest_written = min(oldest_written, before.oldest_version)
        if known is not None:
            self._forget(known)
        self._by_key[key] = self._by_block[block] = IndexedBlock(
            block=block,
            key=key,
            spans=spans,
            oldest_version=oldest_written,
            generation=self._generation,
        )
        self._num_of_generation += 1
        return True

    def use(self, block: int) -> None:
        """A found block has a user again, or one more."""
        if block in self._unused:
            self._unused.remove(block)

    def release(self, block: int, *, keeps: bool) -> bool:
        """The block's last user left. Returns whether it is kept for others to find.

        It is dropped unless it is indexed, can still be found, and the caller `keeps` such blocks.
        """
        entry = self._by_block[block]
        if entry is None:
            return False
        if keeps and entry.generation == self._generation:
            self._unused.append(block)
            return True
        self._forget(entry)
        return False

    def drop_oldest(self) -> int:
        """Drop the longest unused block and return it. There must be one."""
        block = self._unused.pop_first()
        entry = self._by_block[block]
        if entry is not None:
            self._forget(entry)
        return block

    def start_generation(self) -> None:
        """From now on only blocks indexed from now on are found. The others go as they are
        released, or as unused ones are dropped.
        """
        self._generation += 1
        self._num_of_generation = 0

    def _can_be_found(self, entry: IndexedBlock, oldest_version: int | None) -> bool:
        return entry.generation == self._generation and (
            oldest_version is None or entry.oldest_version >= oldest_version
        )

    def _forget(self, entry: IndexedBlock) -> None:
        """The block has no key any more; an unused one stays in line to be dropped."""
        del self._by_key[entry.key]
        self._by_block[entry.block] = None
        self._num_of_generation -= entry.generation == self._generation
