"""Meeting: where the ranks of an engine find each other, by the device that they are on."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

from rollout.backends.process_groups import joined_group
from rollout.parallel.collectives import Collectives, GroupCollectives
from rollout.parallel.shared_collectives import SharedCollectives, shared_by_ranks
from rollout.parallel.shared_memory import SharedMemory, open_shared
from rollout.parallel.stores import connect_store, open_store

_A_DAY_S = 86_400.0
_LOOPBACK, _STORE_S = "127.0.0.1", 300.0  # torch's own limit for a store


class Meeting:
    """Where the ranks of an engine on this machine meet: in shared memory, or, on CUDA devices, in
    a group of NCCL, which no test has run with more than one rank.
    """

    def __init__(self, device: str, size: int, place: str | None = None) -> None:
        """`device`: "cpu" or "cuda". `place`: of the Meeting of rank 0, which gives None."""
        self._device, self._size = device, size
        self._shared: SharedMemory | None = None
        self._store: Any = None
        if device == "cpu":
            if place is None:
                self._shared = shared_by_ranks(size)
                place = self._shared.address
        else:
            if place is None:
                self._store, port = open_store(_LOOPBACK, _STORE_S)
                place = str(port)
            else:
                self._store = connect_store(_LOOPBACK, int(place), _STORE_S)
        self.place = place

    def collectives(
        self, rank: int, *, timeout_s: float, check: Callable[[], None] = lambda: None
    ) -> Collectives:
        """Those of this rank. `check`: called while it waits; may raise. `timeout_s`: may be
        infinite."""
        if self._device == "cpu":
            memory_N = open_shared(self.place) if self._shared is None else self._shared.bytes_N
            return SharedCollectives(rank, self._size, memory_N, timeout_s=timeout_s, check=check)
        timeout = timedelta(seconds=min(timeout_s, _A_DAY_S))
        group, _ = joined_group("nccl", self._store, rank, self._size, timeout)
        return GroupCollectives(group, timeout_s=timeout.total_seconds())

    def close(self) -> None:
        """All ranks have met."""
        if self._shared is not None:
            self._shared.close()
