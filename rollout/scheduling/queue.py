"""RequestQueue: waiting sequences, higher priority first, then arrival."""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from rollout.scheduling.sequence import Sequence

_Order = tuple[int, int]


class RequestQueue:
    """Sorted by `Sequence.order`, so that a preempted request comes back to its place. Adding,
    removing and reading the head cost O(log n). Iteration is in no particular order.
    """

    def __init__(self) -> None:
        self._waiting: dict[_Order, Sequence] = {}
        self._groups: dict[int, dict[_Order, Sequence]] = {}
        # Heaps. Entries of sequences that have left are skipped, and removed once there are many.
        self._by_order: list[_Order] = []
        self._by_arrival: list[tuple[int, _Order]] = []

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._waiting.values())

    @property
    def head(self) -> Sequence:
        """The first sequence in order. The caller has checked that there is one."""
        while self._by_order[0] not in self._waiting:
            heapq.heappop(self._by_order)
        return self._waiting[self._by_order[0]]

    def promote_longest_waiting(self) -> None:
        """Move the request that arrived first to the head. It keeps the head's priority."""
        while self._by_arrival[0][1] not in self._waiting:
            heapq.heappop(self._by_arrival)
        sequence, head = self._waiting[self._by_arrival[0][1]], self.head
        if sequence is not head:
            self.remove(sequence)
            sequence.order = (head.order[0], sequence.order[1])
            self.add(sequence)

    def add(self, sequence: Sequence) -> None:
        order = sequence.order
        self._waiting[order] = sequence
        if sequence.group_id is not None:
            self._groups.setdefault(sequence.group_id, {})[order] = sequence
        heapq.heappush(self._by_order, order)
        heapq.heappush(self._by_arrival, (order[1], order))

    def remove(self, sequence: Sequence) -> None:
        del self._waiting[sequence.order]
        if sequence.group_id is not None:
            group = self._groups[sequence.group_id]
            del group[sequence.order]
            if not group:
                del self._groups[sequence.group_id]
        if len(self._by_order) + len(self._by_arrival) > 4 * len(self._waiting) + 64:
            self._by_order = sorted(self._waiting)
            self._by_arrival = sorted((order[1], order) for order in self._waiting)

    def siblings(self, leader: Sequence) -> list[Sequence]:
        """Waiting members of the leader's group, in order."""
        if leader.group_id is None:
            return []
        group = self._groups.get(leader.group_id, {})
        return [group[order] for order in sorted(group)]
