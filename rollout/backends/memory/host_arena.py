"""MappedHostArena: one reusable, pageable host buffer."""

from __future__ import annotations

from torch import Tensor

from rollout.backends.memory.mapping import Mapping, map_bytes


class MappedHostArena:
    """Implements `HostArena` with an anonymous mapping, which goes when its views are gone."""

    def __init__(self) -> None:
        self._mapping: Mapping | None = None

    def reserve(self, num_bytes: int) -> Tensor:
        """A flat uint8 view of exactly `num_bytes`; earlier contents are lost if it has to grow.

        Raises ConfigError if the memory is not to be had.
        """
        if num_bytes > self.num_bytes or self._mapping is None:
            self._mapping = None  # before the new mapping is made: the two never exist together
            self._mapping = map_bytes("host arena", num_bytes)
        return self._mapping.tensor[:num_bytes]

    @property
    def num_bytes(self) -> int:
        """Bytes the arena can hold without growing."""
        return 0 if self._mapping is None else self._mapping.tensor.numel()

    def discard(self, start: int, end: int) -> int:
        """Free the whole pages in bytes [start, end); contents lost. Returns bytes freed."""
        return 0 if self._mapping is None else self._mapping.give_back(start, end)

    def release(self) -> int:
        """Free the arena. Returns bytes freed."""
        num_bytes = self.num_bytes
        self._mapping = None
        return num_bytes
