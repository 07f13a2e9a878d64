"""BoundedIds: the latest of some ids, in bounded memory."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)


class BoundedIds(Generic[K]):
    """At most `max_ids` ids; beyond, those added first are forgotten."""

    __slots__ = ("_ids", "_max_ids")

    def __init__(self, max_ids: int) -> None:
        # Not a dict: to find its first key it passes over all that were deleted before.
        self._ids: OrderedDict[K, None] = OrderedDict()
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
            self._ids.popitem(last=False)
        return True
