"""SharedCollectives: sums and gathers over ranks of one machine, through shared memory.

Used by `rollout.backends.process_groups`, which makes one for each rank of an engine on a CPU. It
writes to the shared memory. Shape letters: P parity, R ranks, N elements or bytes.
"""

from __future__ import annotations

import ctypes
import errno
import os
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from rollout.errors import LockstepError
from rollout.parallel.collectives import HALF_TYPES, CollectiveAbortedError
from rollout.parallel.shared_memory import SharedMemory

_FLAG_BYTES = 64
_SLOT_BYTES = 1 << 22  # memory for a rank's values; larger tensors are exchanged in pieces
_CHECK_INTERVAL_S = 0.05  # between two calls of `check` while a rank waits


SEMAPHORE_BYTES = 64  # a cache line for each; sem_t has at most 32 bytes
# A try takes about 0.3 microseconds. If each rank has its own processor, the other ranks arrive
# within this number of tries, which is faster than to sleep and wake up.
_NUM_TRIES = 400


class _TimeSpec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_int64), ("nanoseconds", ctypes.c_int64))


class Semaphores:
    """POSIX semaphores in shared memory, one in every SEMAPHORE_BYTES bytes of `bytes_N`. A wait
    returns only after the writes before the matching post are visible to the waiting process (POSIX
    4.12, memory synchronization)."""

    def __init__(self, bytes_N: Tensor) -> None:
        self._bytes_N, start = bytes_N, bytes_N.data_ptr()
        self._addresses = [
            ctypes.c_void_p(start + offset) for offset in range(0, len(bytes_N), SEMAPHORE_BYTES)
        ]
        # Calls that never wait keep the interpreter lock: releasing it takes longer.
        quick, waiting = ctypes.PyDLL(None), ctypes.CDLL(None, use_errno=True)
        self._post, self._try_wait = quick.sem_post, quick.sem_trywait
        self._wait, self._init = waiting.sem_timedwait, waiting.sem_init

    def reset(self) -> None:
        """Set all semaphores to 0. No process may wait for one meanwhile. Raises OSError."""
        for address in self._addresses:
            if self._init(address, 1, 0):
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

    def post(self, indices: Sequence[int]) -> None:
        """Post each of these semaphores once."""
        for index in indices:
            self._post(self._addresses[index])

    def wait(self, index: int, timeout_s: float) -> bool:
        """Wait until the semaphore is posted. Returns False after `timeout_s`. Raises OSError."""
        address, try_wait = self._addresses[index], self._try_wait
        for _ in range(_NUM_TRIES):
            if not try_wait(address):
                return True
        end_ns = time.time_ns() + int(timeout_s * 1e9)
        end = _TimeSpec(*divmod(end_ns, 1_000_000_000))
        while self._wait(address, ctypes.byref(end)):
            if ctypes.get_errno() == errno.ETIMEDOUT:
                return False
            if ctypes.get_errno() != errno.EINTR:
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        return True


def shared_by_ranks(size: int) -> SharedMemory:
    """Return new shared memory for `size` ranks, with all semaphores at 0. Raises ConfigError if
    the system cannot provide the memory."""
    parts = _parts_of(size)
    memory = SharedMemory(sum(parts))
    Semaphores(memory.bytes_N.split(parts)[1]).reset()
    return memory


def _parts_of(size: int) -> list[int]:
    """Return the sizes in bytes of the abort flag, the semaphores and the slots."""
    return [_FLAG_BYTES, size * size * SEMAPHORE_BYTES, 2 * size * _SLOT_BYTES]


class SharedCollectives:
    """`Collectives` in which each rank writes its values to its own slot of shared memory. A rank
    then waits for all others at a barrier, and sums or gathers the slots in the order of ranks."""

    def __init__(
        self,
        rank: int,
        size: int,
        memory_N: Tensor,
        *,
        timeout_s: float,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        """`memory_N` is the memory that `shared_by_ranks` made, the same for all ranks. `timeout_s`
        limits how long this rank waits for another rank. `check` is called while it waits, and may
        raise."""
        self.rank, self.size = rank, size
        self._timeout_s, self._check = timeout_s, check
        self.wait_seconds = 0.0
        flag_N, semaphores_N, slots_N = memory_N.split(_parts_of(size))
        self._is_aborted = flag_N.numpy()[:1]
        # Rank i waits at semaphore [i, j] until rank j posts it.
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
        """Write this rank's part, and return the parts of all ranks, [R, N]. The result is a view
        of the slots, which is valid until the second call after this one."""
        slots_PRN = self._typed.get(part_N.dtype)
        if slots_PRN is None:
            slots_PRN = self._typed[part_N.dtype] = self._slots_PRN.view(part_N.dtype)
        slots_RN = slots_PRN[self._parity, :, : part_N.numel()]
        slots_RN[self.rank].copy_(part_N)
        # Calls use two slots in turn, so one barrier per call is enough: a rank writes to a slot
        # again only after the next call's barrier, which others reach after reading the slot.
        self._parity ^= 1
        self._barrier()
        return slots_RN

    def _barrier(self) -> None:
        """Wait until all ranks have called this method. Raises CollectiveAbortedError after an
        `abort`, LockstepError after the timeout, and what `check` raises."""
        self._semaphores.post(self._posts)
        start = time.perf_counter()
        for index, other in self._waits:
            if not self._semaphores.wait(index, _CHECK_INTERVAL_S):
                self._wait_long(index, other)
        self.wait_seconds += time.perf_counter() - start
        if self._is_aborted[0]:
            raise CollectiveAbortedError

    def _wait_long(self, index: int, other: int) -> None:
        deadline = time.monotonic() + self._timeout_s
        while not self._is_aborted[0]:
            self._check()
            if self._semaphores.wait(index, _CHECK_INTERVAL_S):
                return
            if time.monotonic() >= deadline:
                raise LockstepError(
                    f"rank {other} did not join a collective of {self.size} ranks within "
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
        """Do nothing, since the memory belongs to the caller."""
