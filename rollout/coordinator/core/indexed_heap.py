"""IndexedHeap: keys in the order of a rank that can change. Timers and queues are made of it."""

from __future__ import annotations

import heapq
from collections.abc import Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)


class IndexedHeap(Generic[K]):
    """One rank per key, the lowest first, then the one set first. Every call is logarithmic in the
    number of keys (amortized)."""

    def __init__(self) -> None:
        self._entry_of_key: dict[K, tuple[float, int]] = {}
        self._heap: list[tuple[float, int, K]] = []  # these entries, and outdated ones
        self._num_set = 0

    def __len__(self) -> int:
        return len(self._entry_of_key)

    def __contains__(self, key: K) -> bool:
        return key in self._entry_of_key

    def keys(self) -> list[K]:
        """In no order."""
        return list(self._entry_of_key)

    def set(self, key: K, rank: float, order: int | None = None) -> None:
        """Give the key this rank, and no other. `order` decides among equal ranks."""
        self._num_set += 1
        self._entry_of_key[key] = entry = (rank, self._num_set if order is None else order)
        heapq.heappush(self._heap, (*entry, key))
        # Twice the keys and more: outdated entries pay for the rebuilding that drops them.
        if len(self._heap) > 64 + 2 * len(self._entry_of_key):
            self._heap = [(*entry, key) for key, entry in self._entry_of_key.items()]
            heapq.heapify(self._heap)

    def discard(self, key: K) -> None:
        """Forget the key if it is there."""
        self._entry_of_key.pop(key, None)

    def first(self) -> tuple[float, K] | None:
        """The lowest rank and its key; None without any."""
        heap = self._heap
        while heap:
            rank, order, key = heap[0]
            if self._entry_of_key.get(key) == (rank, order):
                return rank, key
            heapq.heappop(heap)
        return None

    def pop_due(self, now: float) -> K | None:
        """The first key if its rank is at most `now`, and forget it; None without such a key."""
        first = self.first()
        if first is None or first[0] > now:
            return None
        del self._entry_of_key[first[1]]
        return first[1]
