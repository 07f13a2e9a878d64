"""PrefixOwnership: remembers which ranks were assigned which prompt blocks, in bounded memory.

Used by `rollout.coordinator.routing.policies`. A rank that owns a block may have evicted it, or not
have computed it yet. The rank then computes the block. Tokens are right in any case, because an
engine finds its cached blocks by its own keys.
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
    """A table from block hashes to the ranks that own the block, latest rank first.

    A row is one pair (hash, rank). There are at most `max_rows` rows between calls. Above that, the
    least recently assigned blocks are removed with all their ranks. Each operation on one block
    takes amortized constant time.

    Removing a rank leaves its rows behind as dead rows. A dead row is removed when a lookup finds
    it, when it is the oldest row, or when its block has many dead rows."""

    def __init__(self, max_rows: int = DEFAULT_MAX_ROWS) -> None:
        self.max_rows = max_rows
        # Values are plain integers, which the garbage collector does not visit.
        self._latest: OrderedDict[int, int] = OrderedDict()  # hash -> tenure, oldest use first
        self._earlier: dict[int, dict[int, None]] = {}  # hash -> other tenures, last one latest
        # A rank's tenure ends when the rank is removed or dropped, which makes its rows dead.
        self._tenure_of_rank: dict[int, int] = {}
        self._rank_of_tenure: dict[int, int] = {}  # living tenures only
        self._num_tenures = 0
        self._num_rows = 0

    def __len__(self) -> int:
        """Return the number of rows, including dead ones."""
        return self._num_rows

    def add_rank(self, rank: int) -> None:
        assert rank not in self._tenure_of_rank, f"rank {rank} is there already"
        self._tenure_of_rank[rank] = self._num_tenures
        self._rank_of_tenure[self._num_tenures] = rank
        self._num_tenures += 1

    def remove_rank(self, rank: int) -> None:
        """Remove the rank with all its blocks, in constant time."""
        del self._rank_of_tenure[self._tenure_of_rank.pop(rank)]

    def drop_rank(self, rank: int) -> None:
        """Remove all blocks of the rank, in constant time. The rank stays."""
        self.remove_rank(rank)
        self.add_rank(rank)

    def latest_owner(self, block_hash: int) -> int | None:
        """Return the latest rank that owns this block, or None. Removes dead rows of the block."""
        while (tenure := self._latest.get(block_hash)) is not None:
            rank = self._rank_of_tenure.get(tenure)
            if rank is not None:
                return rank
            self._drop_latest(block_hash)
        return None

    def longest_match_owner(self, hashes: Sequence[int]) -> int | None:
        """Return the latest owner of the longest owned prefix of a prompt, or None."""
        # Hashes are chained to their parents: a block stands for all blocks before it.
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
        """Drop the latest row of a block. The row before it becomes the latest."""
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
        """Drop the dead rows of a block, except its latest row."""
        earlier = self._earlier[block_hash]
        living = {tenure: None for tenure in earlier if tenure in self._rank_of_tenure}
        self._earlier[block_hash] = living
        self._num_rows -= len(earlier) - len(living)

    def _evict(self, num_swept: int) -> None:
        """Drop the oldest blocks above `max_rows`. Then drop up to `num_swept` of the oldest rows
        while they are dead."""
        while self._num_rows > self.max_rows:
            block_hash, _ = self._latest.popitem(last=False)
            self._num_rows -= 1 + len(self._earlier.pop(block_hash, ()))
        for _ in range(num_swept):
            oldest = next(iter(self._latest), None)
            if oldest is None or self._latest[oldest] in self._rank_of_tenure:
                break
            self._drop_latest(oldest)
