"""RequestQueue: waiting sequences, higher priority first, then arrival."""

from __future__ import annotations

import bisect
from collections.abc import Iterator

from rollout.scheduling.sequence import Sequence


class RequestQueue:
    """Sorted by `Sequence.order`, so an evicted request comes back at its place."""

    def __init__(self) -> None:
        self._sequences: list[Sequence] = []

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._sequences)

    @property
    def head(self) -> Sequence:
        return self._sequences[0]

    def add(self, sequence: Sequence) -> None:
        bisect.insort(self._sequences, sequence, key=lambda s: s.order)

    def remove(self, sequence: Sequence) -> None:
        index = bisect.bisect_left(self._sequences, sequence.order, key=lambda s: s.order)
        assert self._sequences[index] is sequence
        del self._sequences[index]

    def siblings(self, leader: Sequence) -> Iterator[Sequence]:
        """Waiting members of the leader's group: they arrived right behind it, so they are found in
        order.
        """
        if leader.group_id is None:
            return
        start = bisect.bisect_right(self._sequences, leader.order, key=lambda s: s.order)
        for index in range(start, len(self._sequences)):
            sequence = self._sequences[index]
            if sequence.group_id != leader.group_id:
                return
            yield sequence
