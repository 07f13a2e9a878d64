"""SharedCollectives: sums over ranks of one machine, through memory that they share.

Shape letters: P parity, R ranks, N elements or bytes.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor

from rollout.errors import LockstepError
from rollout.parallel.collectives import HALF_TYPES, CollectiveAbortedError
from rollout.parallel.semaphores import SEMAPHORE_BYTES, Semaphores
from rollout.parallel.shared_memory import SharedMemory

_FLAG_BYTES = 64
_SLOT_BYTES = 1 << 22  # of a rank's values; more go through it piece by piece
_LOOK_S = 0.05  # how often a rank that waits looks whether the others are there


def shared_by_ranks(size: int) -> SharedMemory:
    """Memory through which so many ranks may meet. Raises ConfigError."""
    parts = _parts_of(size)
    memory = SharedMemory(sum(parts))
    Semaphores(memory.bytes_N.split(parts)[1]).reset()
    return memory


def _parts_of(size: int) -> list[int]:
    """Bytes of the flag that a rank has failed, of the semaphores and of the slots."""
    return [_FLAG_BYTES, size * size * SEMAPHORE_BYTES, 2 * size * _SLOT_BYTES]


class SharedCollectives:
    """Implements `Collectives`. Each rank writes its values to a slot of its own, all meet once,
    and each adds up the slots of all ranks, in their order.

    There are two slots for each rank, which calls use in turn. Whoever writes to a slot again has
    met the others since, who had read it by then. So a call takes one meeting.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        memory_N: Tensor,
        *,
        timeout_s: float,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        """`memory_N`: of `shared_by_ranks`, the same on all ranks. `timeout_s`: how long a rank
        waits for the others. `check`: called while it waits; may raise.
        """
        self.rank, self.size = rank, size
        self._timeout_s, self._check = timeout_s, check
        self.wait_seconds = 0.0
        flag_N, semaphores_N, slots_N = memory_N.split(_parts_of(size))
        self._is_aborted = flag_N.numpy()[:1]
        # Semaphore [i, j] is where rank i waits for rank j.
        self._semaphores = Semaphores(semaphores_N)
        others = [other for other in range(size) if other != rank]
        self._waits = [(rank * size + other, other) for other in others]
        self._posts = [other * size + rank for other in others]
        self._slots_PRN = slots_N.view(2, size, _SLOT_BYTES)
        self._typed: dict[torch.dtype, Tensor] = {}
        self._parity = 0

    def all_reduce_(self, x: Tensor) -> Tensor:
        for part_N in self._parts(x):
            slots_RN = self._exchange(part_N)
            if x.dtype in HALF_TYPES:
                sum_N = slots_RN[0].float()
                for slot_N in slots_RN[1:]:
                    sum_N += slot_N
            else:
                sum_N = torch.add(slots_RN[0], slots_RN[1], out=part_N if x.is_cpu else None)
                for slot_N in slots_RN[2:]:
                    sum_N += slot_N
            if sum_N is not part_N:
                part_N.copy_(sum_N)
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        gathered = x.new_empty(self.size, *x.shape)
        gathered_RN, start = gathered.view(self.size, -1), 0
        for part_N in self._parts(x):
            end = start + part_N.numel()
            gathered_RN[:, start:end] = self._exchange(part_N)
            start = end
        return gathered

    def _parts(self, x: Tensor) -> tuple[Tensor, ...]:
        flat_N, most = x.view(-1), _SLOT_BYTES // x.element_size()
        return (flat_N,) if flat_N.numel() <= most else flat_N.split(most)

    def _exchange(self, part_N: Tensor) -> Tensor:
        """The part of each rank, [R, N], in memory that the next call but one overwrites."""
        slots_PRN = self._typed.get(part_N.dtype)
        if slots_PRN is None:
            slots_PRN = self._typed[part_N.dtype] = self._slots_PRN.view(part_N.dtype)
        slots_RN = slots_PRN[self._parity, :, : part_N.numel()]
        slots_RN[self.rank].copy_(part_N)
        self._parity ^= 1
        self._meet()
        return slots_RN

    def _meet(self) -> None:
        """Return when all ranks have come here."""
        self._semaphores.post(self._posts)
        start = time.perf_counter()
        for index, other in self._waits:
            if not self._semaphores.wait(index, _LOOK_S):
                self._wait_long(index, other)
        self.wait_seconds += time.perf_counter() - start
        if self._is_aborted[0]:
            raise CollectiveAbortedError

    def _wait_long(self, index: int, other: int) -> None:
        deadline = time.monotonic() + self._timeout_s
        while not self._is_aborted[0]:
            self._check()
            if self._semaphores.wait(index, _LOOK_S):
                return
            if time.monotonic() >= deadline:
                raise LockstepError(
                    f"rank {other} did not come to a sum over {self.size} ranks within "
                    f"{self._timeout_s:g} s"
                )

    def abort(self) -> None:
        self._is_aborted[0] = 1
        self._semaphores.post(self._posts)

    def reset(self) -> None:
        self._parity = 0
        if self.rank == 0:
            self._semaphores.reset()
            self._is_aborted[0] = 0

    def close(self) -> None:
        """The memory is its owner's."""
