"""BlockManager: gives sequences their blocks and rows, and takes them back."""

from __future__ import annotations

from collections.abc import Iterable

from rollout.blocks.block_pool import BlockPool
from rollout.blocks.prefix_index import IndexedBlock, PrefixIndex
from rollout.blocks.slot_pool import SlotPool
from rollout.version_spans import VersionSpans


class BlockManager:
    """The scheduler's only counterpart. A block table is a list of block ids that the caller keeps.

    `keeps_unused`: an indexed block outlives its last user until its space is needed (LRU), else it
    goes with it (REF_ZERO). Source: PagedAttention (Kwon et al. 2023), sec. 4.
    """

    def __init__(
        self, *, num_blocks: int, block_size: int, num_rows: int, keeps_unused: bool = False
    ) -> None:
        self.block_size = block_size
        self._keeps_unused = keeps_unused
        self._pool = BlockPool(num_blocks)
        self._rows = SlotPool(num_rows)
        self._index = PrefixIndex(num_blocks)

    # ---- counts

    @property
    def num_blocks(self) -> int:
        return self._pool.num_blocks

    @property
    def num_free_blocks(self) -> int:
        """Blocks that can be had: free ones, and indexed ones without a user."""
        return self._pool.num_free + self._index.num_unused

    @property
    def num_used_blocks(self) -> int:
        return self._pool.num_blocks - self.num_free_blocks

    @property
    def num_indexed_blocks(self) -> int:
        return len(self._index)

    @property
    def num_rows(self) -> int:
        return self._rows.num_slots

    @property
    def num_free_rows(self) -> int:
        return self._rows.num_free

    def used_blocks(self) -> list[int]:
        """Ids of the blocks that hold live KV, ascending. Looks at every block of the pool."""
        return self._pool.used_blocks()

    def is_used(self, block: int) -> bool:
        """Whether the block holds live KV."""
        return self._pool.is_used(block)

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    # ---- rows

    def take_row(self) -> int:
        """The lowest free row. The caller has checked `num_free_rows`."""
        return self._rows.take()

    def release_row(self, row: int) -> None:
        self._rows.release(row)

    # ---- blocks

    def reserve(self, table: list[int], start: int, end: int) -> list[tuple[int, int]] | None:
        """Make positions [start, end) writable: append blocks to `table`, replace shared ones in
        it.

        Returns the (source, target) copies to run before anything is written, or None, with nothing
        changed, if there are not enough free blocks.
        """
        first = start // self.block_size
        shared = [i for i in range(first, len(table)) if self._pool.is_shared(table[i])]
        num_new = max(0, self.blocks_for(end) - len(table))
        if num_new + len(shared) > self.num_free_blocks:
            return None
        copies = []
        for index in shared:
            source, target = table[index], self._take()
            self._pool.remove_user(source)
            table[index] = target
            copies.append((source, target))
        table.extend(self._take() for _ in range(num_new))
        return copies

    def fork(self, table: list[int]) -> list[int]:
        """A second table over the same blocks; whoever writes first gets a copy (`reserve`)."""
        for block in table:
            self._pool.add_user(block)
        return list(table)

    def release(self, table: list[int]) -> None:
        """Give the table's blocks back, last first, and empty it."""
        while table:
            block = table.pop()
            is_last = self._pool.remove_user(block)
            if is_last and not self._index.release(block, keeps=self._keeps_unused):
                self._pool.free(block)

    def _take(self) -> int:
        if not self._pool.num_free:
            self._pool.free(self._index.drop_oldest())
        return self._pool.take()

    # ---- prefixes

    def find_prefix(
        self, keys: Iterable[bytes], oldest_version: int | None = None
    ) -> list[IndexedBlock]:
        """Indexed blocks of the longest known prefix, none with KV older than `oldest_version`."""
        return self._index.find(keys, oldest_version)

    def pin(self, entries: Iterable[IndexedBlock]) -> list[int]:
        """A table over indexed blocks, which have a user more from now on."""
        table = []
        for entry in entries:
            self._index.use(entry.block)
            self._pool.add_user(entry.block)
            table.append(entry.block)
        return table

    def index(
        self,
        table: list[int],
        position: int,
        key: bytes,
        spans: VersionSpans,
        oldest_version: int | None = None,
    ) -> bool:
        """Index block `position` of a table, now that all of it is computed. False if it cannot be:

        another block has its key and no KV older than `oldest_version`, or its predecessor in this
        table is not indexed.
        """
        predecessor = table[position - 1] if position else None
        return self._index.add(table[position], key, predecessor, spans, oldest_version)

    def start_index_generation(self) -> None:
        """Make lookups miss every block that is indexed now. O(1): each is freed when it is
        released, or when its space is needed.
        """
        self._index.start_generation()

    def drop_unused(self) -> None:
        """Free every indexed block without a user."""
        while self._index.num_unused:
            self._pool.free(self._index.drop_oldest())
