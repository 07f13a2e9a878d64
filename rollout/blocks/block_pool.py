"""BlockPool: free list and reference counts of KV blocks."""

from __future__ import annotations

from collections import deque


class BlockPool:
    """Blocks 1 .. num_blocks; block 0 is scratch and never handed out. A released block is reused last."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free: deque[int] = deque(range(1, num_blocks + 1))
        self._users = [0] * (num_blocks + 1)

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.num_blocks - len(self._free)

    def take(self) -> int:
        """A free block, with one user. The caller has checked `num_free`."""
        block = self._free.popleft()
        self._users[block] = 1
        return block

    def share(self, block: int) -> None:
        """One more user of a block in use."""
        assert self._users[block] > 0, f"block {block} is free"
        self._users[block] += 1

    def release(self, block: int) -> None:
        """One user less; the last one frees the block."""
        assert self._users[block] > 0, f"block {block} is released twice"
        self._users[block] -= 1
        if not self._users[block]:
            self._free.append(block)

    def is_shared(self, block: int) -> bool:
        return self._users[block] > 1

    def used_blocks(self) -> list[int]:
        """Ids in use, ascending."""
        return [block for block, users in enumerate(self._users) if users]
