"""SlotPool: the rows a request can run in."""

from __future__ import annotations

import heapq


class SlotPool:
    """Slots 1 .. num_slots, lowest first; slot 0 is scratch."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._free = list(range(1, num_slots + 1))
        self._is_taken = [False] * (num_slots + 1)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self) -> int:
        """The lowest free slot. The caller has checked `num_free`."""
        slot = heapq.heappop(self._free)
        self._is_taken[slot] = True
        return slot

    def release(self, slot: int) -> None:
        assert self._is_taken[slot], f"slot {slot} is released twice"
        self._is_taken[slot] = False
        heapq.heappush(self._free, slot)
