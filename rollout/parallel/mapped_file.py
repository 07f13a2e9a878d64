"""MappedFile: a file that is written through memory, and the locks by which it is written again."""

from __future__ import annotations

import fcntl
import mmap
import os
import resource
import weakref

import torch
from torch import Tensor

_LEAST_GROWTH = 1 << 20  # bytes
_LARGEST_GROWTH = 64 << 20


class MappedFile:
    """The bytes of a file in memory, which stay mapped from one writing to the next.

    Pages that are there cost a second writing nothing: a page fault and zeros for each 4 KiB of a
    new file take longer than a copy of the bytes. The owner of the descriptor closes it.
    """

    def __init__(self, descriptor: int, capacity: int) -> None:
        """`capacity`: bytes that it may ever have, of which it takes none now, and at most what
        this process may write to a file. Raises OSError."""
        self._descriptor = descriptor
        limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
        if limit != resource.RLIM_INFINITY:
            capacity = min(capacity, limit)
        os.ftruncate(descriptor, capacity)
        self._bytes_N = torch.frombuffer(mmap.mmap(descriptor, capacity), dtype=torch.uint8)
        os.ftruncate(descriptor, 0)
        self._num_allocated = 0

    def room(self, start: int, num_bytes: int) -> Tensor:
        """Bytes [start, start + num_bytes) of the file, to write to: uint8 [num_bytes].

        Raises OSError if there is no room: memory that is missing must not end the process at the
        first write.
        """
        end = start + num_bytes
        if end > self._num_allocated:
            capacity = len(self._bytes_N)
            if end > capacity:
                raise OSError(f"{end} bytes are more than the {capacity} that it may have")
            growth = min(max(self._num_allocated, _LEAST_GROWTH), _LARGEST_GROWTH)
            try:
                self._allocate(min(max(end, self._num_allocated + growth), capacity))
            except OSError:  # there may be room for less
                self._allocate(end)
        return self._bytes_N[start:end]

    def _allocate(self, end: int) -> None:
        num_allocated = self._num_allocated
        os.posix_fallocate(self._descriptor, num_allocated, end - num_allocated)
        self._num_allocated = end

    def cut(self, num_bytes: int) -> None:
        """Give the file this size, above 0. Raises OSError."""
        self.room(0, num_bytes)  # no byte of it is without memory
        os.ftruncate(self._descriptor, num_bytes)
        self._num_allocated = num_bytes


def lock_for_reading(descriptor: int) -> None:
    """Keep writers away until the last copy of the descriptor is closed, whoever holds it.

    Raises BlockingIOError while it is written.
    """
    fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)


def lock_for_writing(descriptor: int) -> bool:
    """Keep readers away until `unlock`. Returns False if somebody reads it."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def unlock(descriptor: int) -> None:
    """Let everybody read it."""
    fcntl.flock(descriptor, fcntl.LOCK_UN)


def map_for_reading(descriptor: int, num_bytes: int) -> Tensor:
    """The first bytes of a file, uint8 [num_bytes], which nobody must write to.

    The descriptor is the memory's from now on, with its lock: it is closed with the last view.
    Raises OSError and ValueError, and has closed it then.
    """
    try:
        # Private: torch wants writable memory, and the owner's must not be written to.
        region = mmap.mmap(descriptor, num_bytes, flags=mmap.MAP_PRIVATE)
    except BaseException:
        os.close(descriptor)
        raise
    weakref.finalize(region, os.close, descriptor)
    return torch.frombuffer(region, dtype=torch.uint8)
