"""VersionSpans: the weights version of each entry of a sequence, stored as runs.

A request has one VersionSpans for the versions that sampled its tokens, and one for the versions
that wrote its KV. Used by `rollout.requests`, `rollout.engine`, `rollout.scheduling`,
`rollout.blocks`, `rollout.testing` and `rollout_vllm`.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import numpy.typing as npt


class VersionSpans:
    """The integer version of each entry 0 .. len-1 of a sequence, stored as runs.

    Iteration yields `(start, end, version)` for each run, in order and without gaps. Neighbouring
    runs have different versions. Objects with equal entries are equal, even if the entries were
    appended differently.
    """

    # All runs but the last are closed. Copies share the list of closed runs. Each object counts the
    # closed runs that it has, and copies the list before it appends to runs of another object.
    __slots__ = ("_closed", "_length", "_num_closed", "_version", "last_run")

    def __init__(self, runs: Iterable[tuple[int, int]] = ()) -> None:
        """Start with runs of (count, version)."""
        self._closed: list[tuple[int, int]] = []  # (end, version)
        self._num_closed = 0
        self._length = 0
        self._version: int | None = None  # version of the last run; None without entries
        # (start, version, oldest, before): start and version of the last run, the oldest version of
        # all runs, and the sum of the versions of all entries before the last run; undefined if
        # there are no entries. For n > start, the first n entries have the mean
        # (before + (n - start) * version) / n.
        self.last_run = (0, 0, 0, 0)
        for count, version in runs:
            self.append(count, version)

    def __len__(self) -> int:
        """Return the number of entries, not of runs."""
        return self._length

    def __iter__(self) -> Iterator[tuple[int, int, int]]:
        start = 0
        for end, version in self._runs():
            yield start, end, version
            start = end

    def _runs(self) -> list[tuple[int, int]]:
        """Return every run as (end, version)."""
        if self._version is None:
            return []
        return [*self._closed[: self._num_closed], (self._length, self._version)]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, VersionSpans):
            return NotImplemented
        return self._runs() == other._runs()

    def __repr__(self) -> str:
        runs = ", ".join(f"[{start},{end}) v{version}" for start, end, version in self)
        return f"VersionSpans({runs})"

    def append(self, count: int, version: int) -> None:
        """Add `count` entries of `version` at the end. Raises ValueError if `count` < 0. O(1), or
        O(runs) if a copy that shares runs with this object has been appended to."""
        if version == self._version and count > 0:
            self._length += count
            return
        if count <= 0:
            if count < 0:
                raise ValueError(f"count={count} must not be negative")
            return
        if self._version is not None:
            if len(self._closed) != self._num_closed:
                self._closed = self._closed[: self._num_closed]
            start, last, oldest, before = self.last_run
            before += (self._length - start) * last
            self.last_run = (self._length, version, min(oldest, version), before)
            self._closed.append((self._length, self._version))
            self._num_closed += 1
        else:
            self.last_run = (0, version, version, 0)
        self._length += count
        self._version = version

    def truncate(self, length: int) -> None:
        """Drop the entries from `length` on. Copies keep their entries. O(runs)."""
        kept = self.slice(0, length)
        self._closed, self._num_closed = kept._closed, kept._num_closed
        self._length, self._version, self.last_run = kept._length, kept._version, kept.last_run

    def extend(self, other: VersionSpans) -> None:
        """Add all entries of `other`. O(runs of `other`)."""
        for start, end, version in other:
            self.append(end - start, version)

    def version_at(self, index: int) -> int:
        """Return the version of entry `index`. O(log runs). Raises IndexError if there is no such
        entry."""
        if self._version is None or not 0 <= index < self._length:
            raise IndexError(f"entry {index} is outside [0, {self._length})")
        num_closed = self._num_closed
        run = bisect_right(self._closed, index, hi=num_closed, key=_end_of)
        return self._closed[run][1] if run < num_closed else self._version

    def slice(self, start: int, end: int) -> VersionSpans:
        """Return a copy of entries [start, end). Bounds beyond the entries are clipped."""
        part = VersionSpans()
        for run_start, run_end, version in self:
            part.append(max(0, min(run_end, end) - max(run_start, start)), version)
        return part

    def copy(self) -> VersionSpans:
        """Return an independent copy in O(1). Both objects share the list of runs until both
        append."""
        other = VersionSpans()
        other._closed, other._num_closed = self._closed, self._num_closed
        other.last_run = self.last_run
        other._length, other._version = self._length, self._version
        return other

    def min(self) -> int:
        """Return the oldest version. Raises ValueError if there is no entry."""
        if self._version is None:
            raise ValueError("no entries, so no oldest version")
        return self.last_run[2]

    def sum(self) -> int:
        """Return the sum of the versions of all entries."""
        return sum((end - start) * version for start, end, version in self)

    def of_prefixes(
        self, first: int, count: int
    ) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float64]]:
        """Return the oldest and the mean version of the first n entries, for n in [first, first +
        count). The arrays are int32 and float64 of shape [count]. O(runs + count). Raises
        ValueError if `first` < 1 or there are too few entries."""
        if count and not 1 <= first <= first + count - 1 <= len(self):
            raise ValueError(f"prefixes [{first}, {first + count}) of {len(self)} entries")
        oldest_C, mean_C = np.empty(count, np.int32), np.empty(count, np.float64)
        oldest, total = self._runs()[0][1] if self._length else 0, 0
        for start, end, version in self:
            oldest = min(oldest, version)
            low, high = max(start + 1, first), min(end + 1, first + count)
            if low < high:
                lengths = np.arange(low, high)
                oldest_C[low - first : high - first] = oldest
                mean_C[low - first : high - first] = (total + (lengths - start) * version) / lengths
            total += (end - start) * version
        return oldest_C, mean_C

    def to_array(self) -> npt.NDArray[np.int32]:
        """Return one version per entry: int32 of shape [len(self)]."""
        if not self._num_closed:
            return np.full(self._length, self._version or 0, np.int32)
        counts = [end - start for start, end, _ in self]
        versions = np.array([version for _, version in self._runs()], np.int32)
        return np.repeat(versions, counts)

    def serialize(self) -> list[int]:
        """Return the runs as a flat list: count, version, count, version, ..."""
        return [value for start, end, version in self for value in (end - start, version)]

    @classmethod
    def deserialize(cls, runs: Sequence[int]) -> VersionSpans:
        """Return the VersionSpans that `serialize` encoded. Raises ValueError if the list has an
        odd length or a negative count."""
        if len(runs) % 2:
            raise ValueError(f"{len(runs)} numbers are not (count, version) pairs")
        return cls(zip(runs[::2], runs[1::2], strict=True))


def _end_of(run: tuple[int, int]) -> int:
    return run[0]
