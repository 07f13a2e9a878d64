"""Files mapped into memory: MappedFile with its locks, and SharedMemory of several processes."""

from __future__ import annotations

import fcntl
import mmap
import os
import resource
import weakref

import torch
from torch import Tensor

from rollout.errors import ConfigError, LockstepError

_LEAST_GROWTH = 1 << 20  # bytes
_LARGEST_GROWTH = 64 << 20


class MappedFile:
    """A file that is written through memory, and stays mapped from one writing to the next.

    A second writing reuses its pages: page faults and zeroing of a new file take longer than the
    copy of the bytes. The owner of the descriptor closes it.
    """

    def __init__(self, descriptor: int, capacity: int) -> None:
        """`capacity`: the largest size, in bytes, that the file may get; capped by this process's
        limit on file sizes. No memory is taken now. Raises OSError."""
        self._descriptor = descriptor
        limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
        if limit != resource.RLIM_INFINITY:
            capacity = min(capacity, limit)
        os.ftruncate(descriptor, capacity)
        self._bytes_N = torch.frombuffer(mmap.mmap(descriptor, capacity), dtype=torch.uint8)
        os.ftruncate(descriptor, 0)
        self._num_allocated = 0

    def room(self, start: int, num_bytes: int) -> Tensor:
        """Return bytes [start, start + num_bytes) of the file for writing: uint8 [num_bytes].

        Their memory is allocated first, because a write without memory would kill the process.
        Raises OSError without room.
        """
        end = start + num_bytes
        if end > self._num_allocated:
            capacity = len(self._bytes_N)
            if end > capacity:
                raise OSError(f"{end} bytes are more than the file's capacity of {capacity}")
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
        """Set the size of the file, above 0. Raises OSError."""
        self.room(0, num_bytes)  # no byte of it is without memory
        os.ftruncate(self._descriptor, num_bytes)
        self._num_allocated = num_bytes


def lock_for_reading(descriptor: int) -> None:
    """Take a shared lock, until the last copy of the descriptor is closed in any process.

    Raises BlockingIOError while a writer holds the lock.
    """
    fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)


def lock_for_writing(descriptor: int) -> bool:
    """Take the exclusive lock until `unlock`. Returns False if a reader holds the shared one."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def unlock(descriptor: int) -> None:
    """Release the lock."""
    fcntl.flock(descriptor, fcntl.LOCK_UN)


def map_for_reading(descriptor: int, num_bytes: int) -> Tensor:
    """Return the first bytes of a file, uint8 [num_bytes], for reading only.

    Takes the descriptor and its lock: it is closed with the last view, or on an error. Raises
    OSError and ValueError.
    """
    try:
        # Private: torch wants writable memory, and the owner's must not be written to.
        region = mmap.mmap(descriptor, num_bytes, flags=mmap.MAP_PRIVATE)
    except BaseException:
        os.close(descriptor)
        raise
    weakref.finalize(region, os.close, descriptor)
    return torch.frombuffer(region, dtype=torch.uint8)


class SharedMemory:
    """Memory of several processes of one machine. Linux only.

    `bytes_N`, uint8, is the same memory in all processes that opened `address`. It has no name that
    could be left behind: the system frees it with the last process.
    """

    def __init__(self, num_bytes: int) -> None:
        """Make `num_bytes` zeros. A page takes memory once it is written to. Raises ConfigError."""
        if not hasattr(os, "memfd_create"):
            raise ConfigError(
                "tensor_parallel_size above 1 on a CPU needs Linux (memfd_create); use 1"
            )
        self._descriptor: int | None = os.memfd_create("rollout-ranks", os.MFD_CLOEXEC)
        try:
            os.ftruncate(self._descriptor, num_bytes)
            self.bytes_N = _mapped(self._descriptor)
        except OSError as error:
            os.close(self._descriptor)
            raise ConfigError(f"no shared memory for {num_bytes} bytes ({error})") from error
        self.address = f"/proc/{os.getpid()}/fd/{self._descriptor}"

    def close(self) -> None:
        """Let no further process open it; those that have keep it. A second call does nothing."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def open_shared(address: str) -> Tensor:
    """Return the bytes of the SharedMemory at `address` of a live process. Raises
    LockstepError."""
    try:
        descriptor = os.open(address, os.O_RDWR | os.O_CLOEXEC)
        try:
            return _mapped(descriptor)
        finally:
            os.close(descriptor)
    except (OSError, ValueError) as error:
        raise LockstepError(
            f"the memory at {address} of rank 0 cannot be opened: {error}"
        ) from error


def _mapped(descriptor: int) -> Tensor:
    return torch.frombuffer(mmap.mmap(descriptor, 0), dtype=torch.uint8)
