"""BoundedIds: the latest of some ids, in bounded memory."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)


class BoundedIds(Generic[K]):
    """At most `max_ids` ids; beyond, those added first are forgotten."""

    __slots__ = ("_ids", "_max_ids")

    def __init__(self, max_ids: int) -> None:
        self._ids: dict[K, None] = {}
        self._max_ids = max_ids

    def __contains__(self, key: K) -> bool:
        return key in self._ids

    def __len__(self) -> int:
        return len(self._ids)

    def add(self, key: K) -> bool:
        """Add `key`; returns whether it is new, as far as is remembered."""
        if key in self._ids:
            return False
        self._ids[key] = None
        if len(self._ids) > self._max_ids:
            del self._ids[next(iter(self._ids))]
        return True
