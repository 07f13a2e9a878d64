"""PrefixOwnership: the ranks that each prompt block was assigned to, in bounded memory.

It remembers assignments, not caches: a rank may have evicted a block, or not have computed it yet.
A wrong row costs a prefill, never a wrong token: an engine finds its blocks by its own keys. Used
by `rollout.coordinator.routing.policies`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

# 180 MiB when full. Python then rebuilds the table once per 1.8 million new blocks, in 0.15 s.
DEFAULT_MAX_ROWS = 1_000_000

# Dead rows removed per assigned block, at most: above 1, so that they vanish faster than rows are
# added.
SWEEP_RATE = 2


class PrefixOwnership:
    """A table of block hash -> the ranks that own the block, the latest one first.

    A row is one (hash, rank); between calls there are at most `max_rows`. Beyond that, the least
    recently assigned blocks are removed with all their ranks. A lookup or assignment of a block
    takes a few dict operations, whatever the number of rows and ranks (amortized).

    A rank's rows belong to its tenure, which ends when the rank leaves or drops its blocks. Rows of
    ended tenures are dead. They are removed when a lookup finds them, when they are the oldest, or
    when one block has many of them.
    """

    def __init__(self, max_rows: int = DEFAULT_MAX_ROWS) -> None:
        self.max_rows = max_rows
        # Values are plain integers, which the garbage collector does not visit.
        self._latest: OrderedDict[int, int] = OrderedDict()  # hash -> tenure, oldest use first
        self._earlier: dict[int, dict[int, None]] = {}  # hash -> other tenures, last one latest
        self._tenure_of_rank: dict[int, int] = {}
        self._rank_of_tenure: dict[int, int] = {}  # living tenures only
        self._num_tenures = 0
        self._num_rows = 0

    def __len__(self) -> int:
        """Return the number of rows, including dead ones."""
        return self._num_rows

    def add_rank(self, rank: int) -> None:
        """Add a rank that owns no block yet."""
        assert rank not in self._tenure_of_rank, f"rank {rank} is there already"
        self._tenure_of_rank[rank] = self._num_tenures
        self._rank_of_tenure[self._num_tenures] = rank
        self._num_tenures += 1

    def remove_rank(self, rank: int) -> None:
        """Remove the rank with all its blocks. Constant time."""
        del self._rank_of_tenure[self._tenure_of_rank.pop(rank)]

    def drop_rank(self, rank: int) -> None:
        """Remove all blocks of the rank. Constant time."""
        self.remove_rank(rank)
        self.add_rank(rank)

    def latest_owner(self, block_hash: int) -> int | None:
        """Return the latest rank that owns this block; None without an owner. Removes dead rows."""
        while (tenure := self._latest.get(block_hash)) is not None:
            rank = self._rank_of_tenure.get(tenure)
            if rank is not None:
                return rank
            self._drop_latest(block_hash)
        return None

    def longest_match_owner(self, hashes: Sequence[int]) -> int | None:
        """Return the latest owner of the deepest owned block of a prompt; None without one.

        Hashes are chained to their parents: the deepest block stands for all blocks before it.
        """
        for block_hash in reversed(hashes):
            rank = self.latest_owner(block_hash)
            if rank is not None:
                return rank
        return None

    def assign(self, rank: int, hashes: Sequence[int]) -> None:
        """Make the rank the latest owner of the blocks of this prompt."""
        tenure, latest = self._tenure_of_rank[rank], self._latest
        # Deepest first: no block outlives its parent, which a prompt matched to it would need.
        for block_hash in reversed(hashes):
            previous = latest.get(block_hash)
            if previous is None:
                latest[block_hash] = tenure
                self._num_rows += 1
                continue
            if previous != tenure:
                self._supersede(block_hash, previous, tenure)
            latest.move_to_end(block_hash)
        self._evict(SWEEP_RATE * len(hashes))

    def _supersede(self, block_hash: int, previous: int, tenure: int) -> None:
        """Put `tenure` before `previous`, which was the latest tenure of this block."""
        if tenure in self._earlier.get(block_hash, ()):
            self._drop_earlier(block_hash, tenure)
        self._latest[block_hash] = tenure
        if previous in self._rank_of_tenure:
            earlier = self._earlier.setdefault(block_hash, {})
            earlier[previous] = None
            self._num_rows += 1
            # Twice the living: a filtering then removes as many as it keeps.
            if len(earlier) > 2 * len(self._rank_of_tenure):
                self._drop_dead(block_hash)

    def _drop_latest(self, block_hash: int) -> None:
        """Drop the latest row of a block; the row before it, if any, becomes the latest."""
        earlier = self._earlier.get(block_hash)
        if earlier:
            tenure, _ = earlier.popitem()
            self._latest[block_hash] = tenure
            if not earlier:
                del self._earlier[block_hash]
        else:
            del self._latest[block_hash]
        self._num_rows -= 1

    def _drop_earlier(self, block_hash: int, tenure: int) -> None:
        earlier = self._earlier[block_hash]
        del earlier[tenure]
        if not earlier:
            del self._earlier[block_hash]
        self._num_rows -= 1

    def _drop_dead(self, block_hash: int) -> None:
        """Drop the earlier dead rows of a block that is used too often to become the oldest one."""
        earlier = self._earlier[block_hash]
        living = {tenure: None for tenure in earlier if tenure in self._rank_of_tenure}
        self._earlier[block_hash] = living
        self._num_rows -= len(earlier) - len(living)

    def _evict(self, num_swept: int) -> None:
        """Drop the oldest blocks above the bound, then up to `num_swept` of the oldest rows if they
        are dead."""
        while self._num_rows > self.max_rows:
            block_hash, _ = self._latest.popitem(last=False)
            self._num_rows -= 1 + len(self._earlier.pop(block_hash, ()))
        for _ in range(num_swept):
            oldest = next(iter(self._latest), None)
            if oldest is None or self._latest[oldest] in self._rank_of_tenure:
                break
            self._drop_latest(oldest)
