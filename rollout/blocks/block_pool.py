"""BlockPool: free list and reference counts of KV blocks."""

from __future__ import annotations

from array import array
from collections import deque
from itertools import compress, count


class BlockPool:
    """Blocks 1 .. num_blocks; block 0 is scratch and never handed out.

    A block is free, in use, or idle: without a user, but not free yet. A freed block is reused
    last.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free: deque[int] = deque(range(1, num_blocks + 1))
        self._users = array("i", bytes(4 * (num_blocks + 1)))

    @property
    def num_free(self) -> int:
        """Blocks that can be taken."""
        return len(self._free)

    def take(self) -> int:
        """A free block, with one user. The caller has checked `num_free`."""
        block = self._free.popleft()
        self._users[block] = 1
        return block

    def add_user(self, block: int) -> None:
        """One more user of a block that is in use or idle."""
        self._users[block] += 1

    def remove_user(self, block: int) -> bool:
        """One user less. True if it was the last: the block is idle then, until it is freed."""
        assert self._users[block] > 0, f"block {block} is released twice"
        self._users[block] -= 1
        return not self._users[block]

    def free(self, block: int) -> None:
        """Make an idle block free."""
        assert not self._users[block], f"block {block} is in use"
        self._free.append(block)

    def is_shared(self, block: int) -> bool:
        """Whether more than one table uses the block."""
        return self._users[block] > 1

    def is_used(self, block: int) -> bool:
        """Whether any table uses the block."""
        return self._users[block] > 0

    def used_blocks(self) -> list[int]:
        """Ids in use, ascending."""
        return list(compress(count(), self._users))
