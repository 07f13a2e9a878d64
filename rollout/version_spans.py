"""Run-length record of which version made each entry of a sequence."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import numpy.typing as npt


class VersionSpans:
    """Entries 0..len-1 of a sequence, each made under one integer version, stored as runs.

    Iteration yields `(start, end, version)` per run, in order and without gaps; neighbouring runs
    have different versions, so two equal sequences compare equal however they were appended.
    """

    __slots__ = ("_ends", "_versions")

    def __init__(self, runs: Iterable[tuple[int, int]] = ()) -> None:
        """Start with `(count, version)` runs."""
        self._ends: list[int] = []
        self._versions: list[int] = []
        for count, version in runs:
            self.append(count, version)

    def __len__(self) -> int:
        """Number of entries, not of runs."""
        return self._ends[-1] if self._ends else 0

    def __iter__(self) -> Iterator[tuple[int, int, int]]:
        start = 0
        for end, version in zip(self._ends, self._versions, strict=True):
            yield start, end, version
            start = end

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, VersionSpans):
            return NotImplemented
        return self._ends == other._ends and self._versions == other._versions

    def __repr__(self) -> str:
        runs = ", ".join(f"[{start},{end}) v{version}" for start, end, version in self)
        return f"VersionSpans({runs})"

    def append(self, count: int, version: int) -> None:
        """Add `count` entries made under `version`. O(1). Raises ValueError if `count` < 0."""
        if count <= 0:
            if count < 0:
                raise ValueError(f"count={count} must not be negative")
            return
        ends = self._ends
        if not ends:
            ends.append(count)
            self._versions.append(version)
        elif self._versions[-1] == version:
            ends[-1] += count
        else:
            ends.append(ends[-1] + count)
            self._versions.append(version)

    def extend(self, other: VersionSpans) -> None:
        """Add all entries of `other`. O(runs of `other`)."""
        for start, end, version in other:
            self.append(end - start, version)

    def truncate(self, length: int) -> None:
        """Keep the first `length` entries. Raises ValueError unless 0 <= length <= len(self)."""
        if not 0 <= length <= len(self):
            raise ValueError(f"length={length} must be in [0, {len(self)}]")
        num_runs = bisect_right(self._ends, length)
        run_is_cut = length > (self._ends[num_runs - 1] if num_runs else 0)
        del self._ends[num_runs + run_is_cut :]
        del self._versions[num_runs + run_is_cut :]
        if run_is_cut:
            self._ends[-1] = length

    def version_at(self, index: int) -> int:
        """Return the version of entry `index`. O(log runs). Raises IndexError if there is none."""
        if not 0 <= index < len(self):
            raise IndexError(f"entry {index} is outside [0, {len(self)})")
        return self._versions[bisect_right(self._ends, index)]

    def slice(self, start: int, end: int) -> VersionSpans:
        """Return a copy of entries [start, end); bounds beyond the entries are cut to them."""
        part = VersionSpans()
        for run_start, run_end, version in self:
            part.append(max(0, min(run_end, end) - max(run_start, start)), version)
        return part

    def copy(self) -> VersionSpans:
        """Return an independent copy."""
        other = VersionSpans()
        other._ends = self._ends.copy()
        other._versions = self._versions.copy()
        return other

    def min(self) -> int:
        """Return the oldest version. Raises ValueError if there is no entry."""
        if not self._versions:
            raise ValueError("no entries, so no oldest version")
        return min(self._versions)

    def sum(self) -> int:
        """Return the sum of the versions over all entries (mean = sum() / len())."""
        return sum((end - start) * version for start, end, version in self)

    def to_array(self) -> npt.NDArray[np.int32]:
        """Return one version per entry: int32 of shape [len(self)]."""
        counts = [end - start for start, end, _ in self]
        return np.repeat(np.asarray(self._versions, dtype=np.int32), counts)

    def serialize(self) -> list[int]:
        """Return the runs as a flat list: count, version, count, version, ..."""
        return [value for start, end, version in self for value in (end - start, version)]

    @classmethod
    def deserialize(cls, runs: Sequence[int]) -> VersionSpans:
        """Return what `serialize` wrote. Raises ValueError if the list is not pairs."""
        if len(runs) % 2:
            raise ValueError(f"{len(runs)} numbers are not (count, version) pairs")
        return cls(zip(runs[::2], runs[1::2], strict=True))
