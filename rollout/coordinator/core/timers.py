"""Timers: what is due when. No clock: the time is an argument."""

from __future__ import annotations

import heapq
from collections.abc import Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)


class Timers(Generic[K]):
    """One time per key. Every call is logarithmic in the number of keys (amortized)."""

    def __init__(self) -> None:
        self._entry_of_key: dict[K, tuple[float, int]] = {}
        self._heap: list[tuple[float, int, K]] = []  # these entries, and outdated ones
        self._num_set = 0

    def __len__(self) -> int:
        return len(self._entry_of_key)

    def __contains__(self, key: K) -> bool:
        return key in self._entry_of_key

    def set(self, key: K, at_s: float) -> None:
        """The key is due at `at_s`, and at no other time."""
        self._num_set += 1
        self._entry_of_key[key] = (at_s, self._num_set)
        heapq.heappush(self._heap, (at_s, self._num_set, key))
        # Twice the keys and more: outdated entries pay for the rebuilding that drops them.
        if len(self._heap) > 64 + 2 * len(self._entry_of_key):
            self._heap = [(at, order, key) for key, (at, order) in self._entry_of_key.items()]
            heapq.heapify(self._heap)

    def cancel(self, key: K) -> None:
        """The key is not due any more, if it was."""
        self._entry_of_key.pop(key, None)

    def next_at(self) -> float | None:
        """When the earliest key is due; None without any."""
        self._drop_outdated()
        return self._heap[0][0] if self._heap else None

    def pop_due(self, now: float) -> K | None:
        """The earliest key that is due at `now`, which is forgotten; None without any."""
        self._drop_outdated()
        if not self._heap or self._heap[0][0] > now:
            return None
        key = heapq.heappop(self._heap)[2]
        del self._entry_of_key[key]
        return key

    def _drop_outdated(self) -> None:
        heap = self._heap
        while heap and self._entry_of_key.get(heap[0][2]) != heap[0][:2]:
            heapq.heappop(heap)
