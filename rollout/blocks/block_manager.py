"""BlockManager: gives sequences their blocks and rows, and takes them back."""

from __future__ import annotations

from rollout.blocks.block_pool import BlockPool
from rollout.blocks.slot_pool import SlotPool


class BlockManager:
    """The scheduler's only counterpart. A block table is a list of block ids that the caller keeps.

    Source: PagedAttention (Kwon et al. 2023), sec. 4.
    """

    def __init__(self, *, num_blocks: int, block_size: int, num_rows: int) -> None:
        self.block_size = block_size
        self._pool = BlockPool(num_blocks)
        self._rows = SlotPool(num_rows)

    @property
    def num_blocks(self) -> int:
        return self._pool.num_blocks

    @property
    def num_free_blocks(self) -> int:
        return self._pool.num_free

    @property
    def num_used_blocks(self) -> int:
        return self._pool.num_used

    @property
    def num_rows(self) -> int:
        return self._rows.num_slots

    @property
    def num_free_rows(self) -> int:
        return self._rows.num_free

    def used_blocks(self) -> list[int]:
        """Ids of the blocks that hold live KV, ascending."""
        return self._pool.used_blocks()

    def take_row(self) -> int:
        return self._rows.take()

    def release_row(self, row: int) -> None:
        self._rows.release(row)

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    def reserve(self, table: list[int], start: int, end: int) -> list[tuple[int, int]] | None:
        """Make positions [start, end) writable: append blocks to `table`, and replace shared ones in it.

        Returns the (source, target) copies to run before anything is written, or None, with nothing changed,
        if there are not enough free blocks.
        """
        first = start // self.block_size
        shared = [i for i in range(first, len(table)) if self._pool.is_shared(table[i])]
        num_new = max(0, self.blocks_for(end) - len(table))
        if num_new + len(shared) > self._pool.num_free:
            return None
        copies = []
        for index in shared:
            source, target = table[index], self._pool.take()
            self._pool.release(source)
            table[index] = target
            copies.append((source, target))
        table.extend(self._pool.take() for _ in range(num_new))
        return copies

    def fork(self, table: list[int]) -> list[int]:
        """A second table over the same blocks; whoever writes first gets a copy (`reserve`)."""
        for block in table:
            self._pool.share(block)
        return list(table)

    def release(self, table: list[int]) -> None:
        """Give the table's blocks back, last first, and empty it."""
        while table:
            self._pool.release(table.pop())
