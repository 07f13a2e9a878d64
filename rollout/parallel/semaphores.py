"""Semaphores of POSIX in shared memory: what was written before a post is seen after its wait, on
any processor (POSIX 4.12, memory synchronization).
"""

from __future__ import annotations

import ctypes
import errno
import os
import time
from collections.abc import Sequence

from torch import Tensor

SEMAPHORE_BYTES = 64  # sem_t has 32 at most; each is in a cache line of its own
# A try takes about 0.3 microseconds. Ranks that have processors of their own come that close
# together; to sleep and wake up takes longer.
_NUM_TRIES = 400


class _TimeSpec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_int64), ("nanoseconds", ctypes.c_int64))


class Semaphores:
    """One semaphore for each SEMAPHORE_BYTES of `bytes_N`, which processes share."""

    def __init__(self, bytes_N: Tensor) -> None:
        self._bytes_N, start = bytes_N, bytes_N.data_ptr()
        self._addresses = [
            ctypes.c_void_p(start + offset) for offset in range(0, len(bytes_N), SEMAPHORE_BYTES)
        ]
        # Calls that never wait keep the interpreter's lock: to give it back takes longer.
        quick, waiting = ctypes.PyDLL(None), ctypes.CDLL(None, use_errno=True)
        self._post, self._try_wait = quick.sem_post, quick.sem_trywait
        self._wait, self._init = waiting.sem_timedwait, waiting.sem_init

    def reset(self) -> None:
        """Set all of them to 0. Nobody may wait at one, in any process."""
        for address in self._addresses:
            if self._init(address, 1, 0):
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

    def post(self, indices: Sequence[int]) -> None:
        """Let one wait at each of these semaphores end."""
        for index in indices:
            self._post(self._addresses[index])

    def wait(self, index: int, timeout_s: float) -> bool:
        """Wait until the semaphore is posted, or for so long. Returns whether it was."""
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
