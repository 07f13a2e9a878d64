"""KVCacheManager: allocates KV blocks and rows to requests, and shares blocks of equal prefixes.

`rollout.engine.build` creates it. Scheduler and its parts call it. Suspension reads the blocks to
offload, and Engine excludes cached prefixes after weight updates. It counts blocks and moves no
bytes.
Source: PagedAttention (Kwon et al. 2023), sec. 4.
"""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import compress, count

from rollout.blocks.prefix_index import ROOT_KEY, PrefixIndex, block_key
from rollout.version_spans import VersionSpans

# Replaces the version in block keys if prefixes are reused across versions.
ANY_VERSION = -1


@dataclass(slots=True, eq=False, kw_only=True)
class BlockTable:
    """The row and the blocks of one request. KVCacheManager changes them, and Scheduler sets
    `num_shared` of a forked request.

    blocks: block i holds the KV of positions [i * block_size, (i + 1) * block_size).
    row: the request's row; 0 while it has no row.
    num_shared: number of leading blocks that another request computed and may still use.
    num_cached: number of leading blocks that are in the prefix index.
    is_cacheable: False once a full block could not enter the index, because later blocks cannot
        either.
    root_key: parent key of the first block, which depends on the request's salt.
    keys: keys of the leading blocks for the prefix index, as far as they were computed.
    key_version: the weights version that is part of `keys`.
    """

    blocks: list[int] = field(default_factory=list)
    row: int = 0
    num_shared: int = 0
    num_cached: int = 0
    is_cacheable: bool = True
    root_key: bytes = ROOT_KEY
    keys: list[bytes] = field(default_factory=list)
    key_version: int = 0


class KVCacheManager:
    """Allocates blocks and rows. Only this class writes the prefix index.

    Blocks are 1 .. num_blocks, and rows are 1 .. num_rows. Block 0 and row 0 are scratch: no
    request holds them. A block is in one of three states: free (in `free_blocks`), in use by one or
    more requests, or unused. An unused block has no user, but stays in the index until its space is
    needed. Free blocks are allocated last freed first, so that the same memory is used again.
    Unused blocks that requests can still share are allocated only if no other block is left,
    longest unused first.

    Requests that begin with the same tokens can share a full block. Without
    `reuse_across_versions`, a block enters the index only if one weights version wrote it and all
    blocks before it, and it is found only under this version. With `reuse_across_versions` any full
    block enters the index. It is found unless it holds KV that is more than `max_age_versions`
    older than the current weights. KV excluded by `distrust` is found under no later version.

    If `keeps_unused` is set (LRU), an indexed block outlives its last user until its space is
    needed. Otherwise (REF_ZERO) it leaves the index with its last user.
    """

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        num_rows: int,
        enable_prefix_caching: bool = False,
        keeps_unused: bool = False,
        reuse_across_versions: bool = False,
        max_age_versions: int | None = None,
    ) -> None:
        self.num_blocks, self.block_size, self.num_rows = num_blocks, block_size, num_rows
        self.enable_prefix_caching = enable_prefix_caching
        self.reuse_across_versions = reuse_across_versions
        self.prefix_index = PrefixIndex(num_blocks, keeps_unused=keeps_unused)
        self._max_age_versions = max_age_versions
        # Later versions do not match KV of this version or of earlier ones.
        self._distrusted_version: int | None = None
        self.free_blocks = list(range(num_blocks, 0, -1))  # the last one is allocated next
        self._num_users = array("i", bytes(4 * (num_blocks + 1)))
        self._free_rows = list(range(1, num_rows + 1))
        self._is_row_taken = [False] * (num_rows + 1)

    # ---- counts

    @property
    def num_free_blocks(self) -> int:
        """Number of blocks that can be allocated: free and unused blocks."""
        return len(self.free_blocks) + self.prefix_index.unused.num_blocks

    @property
    def num_used_blocks(self) -> int:
        """Number of blocks that at least one request holds."""
        return self.num_blocks - self.num_free_blocks

    @property
    def num_free_rows(self) -> int:
        """Number of rows that no request holds."""
        return len(self._free_rows)

    def used_blocks(self) -> list[int]:
        """Return the ids of the blocks that requests hold, ascending. O(blocks of the pool)."""
        return list(compress(count(), self._num_users))

    def num_users(self, block: int) -> int:
        """Return how many block tables contain the block."""
        return self._num_users[block]

    def blocks_for(self, num_tokens: int) -> int:
        """Return how many blocks hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    # ---- rows and blocks

    def allocate_row(self, table: BlockTable) -> None:
        """Give the request the lowest free row. A row must be free."""
        table.row = heapq.heappop(self._free_rows)
        self._is_row_taken[table.row] = True

    def free_row(self, table: BlockTable) -> None:
        assert self._is_row_taken[table.row], f"row {table.row} is freed twice"
        self._is_row_taken[table.row] = False
        heapq.heappush(self._free_rows, table.row)
        table.row = 0

    def allocate(self, table: BlockTable, start: int, end: int) -> list[tuple[int, int]] | None:
        """Make positions [start, end) writable: append blocks, and replace shared blocks by own
        copies. Returns (source, target) pairs of blocks, which must be copied before anything is
        written. Returns None, with nothing changed, if too few blocks are free."""
        blocks, users = table.blocks, self._num_users
        first = start // self.block_size
        shared = [i for i in range(first, len(blocks)) if users[blocks[i]] > 1]
        num_new = max(0, self.blocks_for(end) - len(blocks))
        if num_new + len(shared) > self.num_free_blocks:
            return None
        copies = []
        for index in shared:
            source, target = blocks[index], self._take_block()
            users[source] -= 1
            blocks[index] = target
            copies.append((source, target))
        blocks.extend([self._take_block() for _ in range(num_new)])
        return copies

    def fork(self, parent: BlockTable, child: BlockTable) -> None:
        """Let `child` share all blocks of `parent`. `allocate` replaces a shared block before it is
        written."""
        for block in parent.blocks:
            self._num_users[block] += 1
        child.blocks = list(parent.blocks)

    def free(self, table: BlockTable) -> None:
        """Free all blocks of the request, last block first. Its keys are kept for its next run."""
        while table.blocks:
            block = table.blocks.pop()
            assert self._num_users[block] > 0, f"block {block} is freed twice"
            self._num_users[block] -= 1
            if not self._num_users[block] and not self.prefix_index.release(block):
                self.free_blocks.append(block)
        table.num_shared = table.num_cached = 0
        table.is_cacheable = True

    def _take_block(self) -> int:
        """Allocate a block to one user and return it. A block must be free or unused."""
        # Dropped blocks go first: their memory has been written, that of a free block perhaps not.
        if self.prefix_index.num_dropped or not self.free_blocks:
            block = self.prefix_index.evict_oldest()
        else:
            block = self.free_blocks.pop()
        self._num_users[block] = 1
        return block

    # ---- shared prefixes

    def match_prefix(self, table: BlockTable, tokens: Sequence[int], version: int) -> VersionSpans:
        """Append to `table` the cached blocks of the longest prefix of `tokens` that weights
        `version` may reuse.

        `table` has no block yet. The match ends before the block of the last token, whose logits
        must be computed. Returns the version that wrote each matched position.
        """
        spans = VersionSpans()
        if not self.enable_prefix_caching:
            return spans
        key_version = ANY_VERSION if self.reuse_across_versions else version
        keys = (
            self._key(table, tokens, position, key_version)
            for position in range((len(tokens) - 1) // self.block_size)
        )
        for entry in self.prefix_index.find(keys, self._oldest_version(version)):
            self.prefix_index.use(entry.block)
            self._num_users[entry.block] += 1
            table.blocks.append(entry.block)
            spans.extend(entry.spans)
        table.num_cached = table.num_shared = len(table.blocks)
        return spans

    def cache_blocks(
        self, table: BlockTable, tokens: Sequence[int], spans: VersionSpans, version: int
    ) -> None:
        """Index the blocks that became full since the last call. `version` is the current weights
        version.

        `spans` has the version that wrote each computed position, and `tokens` has a token for
        each. A block cannot enter the index if its predecessor is not in the index, or if another
        block holds its key (see PrefixIndex.add). Without `reuse_across_versions`, the block's KV
        must have the version of the first position.
        """
        if not self.enable_prefix_caching or not table.is_cacheable:
            return
        while (table.num_cached + 1) * self.block_size <= len(spans):
            if not self._cache_next(table, tokens, spans, version):
                table.is_cacheable = False
                return

    def _cache_next(
        self, table: BlockTable, tokens: Sequence[int], spans: VersionSpans, version: int
    ) -> bool:
        """Index the table's first block that is not in the index. Returns False if it cannot enter
        the index."""
        position, block_size = table.num_cached, self.block_size
        block_spans = spans.slice(position * block_size, (position + 1) * block_size)
        key_version = ANY_VERSION
        if not self.reuse_across_versions:
            key_version = spans.version_at(0)
            is_of_one_version = block_spans.sum() == key_version * block_size
            if block_spans.min() != key_version or not is_of_one_version:
                return False
        is_indexed = self.prefix_index.add(
            table.blocks[position],
            self._key(table, tokens, position, key_version),
            table.blocks[position - 1] if position else None,
            block_spans,
            self._oldest_version(version),
        )
        table.num_cached += is_indexed
        return is_indexed

    def copy_cache_state(self, parent: BlockTable, child: BlockTable) -> None:
        """Copy the parent's keys and index state to a fork that holds the same blocks."""
        child.keys, child.key_version = list(parent.keys), parent.key_version
        child.num_cached, child.is_cacheable = parent.num_cached, parent.is_cacheable

    def begin_weights_version(self) -> None:
        """Exclude all indexed blocks from later matches, because the weights have changed. O(1).
        Does nothing if `reuse_across_versions` is set."""
        if self.enable_prefix_caching and not self.reuse_across_versions:
            self.prefix_index.start_generation()

    def distrust(self, version: int) -> None:
        """Exclude KV written by `version` or earlier versions from matches under later versions.
        O(1)."""
        # The KV may hold NaN, which would fail every request that reads it.
        before = self._distrusted_version
        self._distrusted_version = version if before is None else max(before, version)

    def drop_unused_blocks(self) -> None:
        """Exclude all blocks without a user from later matches, because their KV may be lost.
        O(1)."""
        self.prefix_index.drop_unused()

    def _oldest_version(self, version: int) -> int | None:
        """Return the oldest version whose KV may be reused under `version`; None if all KV may be
        reused."""
        bounds = []
        if self._max_age_versions is not None:
            bounds.append(version - self._max_age_versions)
        if self._distrusted_version is not None and version > self._distrusted_version:
            bounds.append(self._distrusted_version + 1)
        return max(bounds, default=None)

    def _key(
        self, table: BlockTable, tokens: Sequence[int], position: int, key_version: int
    ) -> bytes:
        """Return the key of block `position` of the request. Each key is computed once."""
        if table.key_version != key_version:
            table.keys, table.key_version = [], key_version
        keys, block_size = table.keys, self.block_size
        while len(keys) <= position:
            start = len(keys) * block_size
            parent = keys[-1] if keys else table.root_key
            keys.append(block_key(parent, key_version, tokens[start : start + block_size]))
        return keys[position]
