"""Files mapped into the memory of several processes of one machine. Linux only.

MappedFile is written through memory, and has locks for its readers and writers. SharedMemory is
plain memory that all ranks of an engine write to. TensorFile writes tensors to an anonymous file,
and SharedTensors reads them there: the weights of a push, of a checkpoint, or for other ranks.
"""

from __future__ import annotations

import fcntl
import math
import mmap
import os
import resource
import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from rollout.errors import ConfigError, LockstepError, WeightUpdateError

_LEAST_GROWTH = 1 << 20  # bytes
_LARGEST_GROWTH = 64 << 20
_ALIGNMENT = 64  # bytes


class MappedFile:
    """A file that is written through memory, and stays mapped from one writing to the next.

    A second writing reuses its pages: page faults and zeroing of a new file take longer than the
    copy of the bytes. The owner of the descriptor closes it.
    """

    def __init__(self, descriptor: int, capacity: int) -> None:
        """Map an empty file. `capacity`: the largest size, in bytes, that the file may get;
        capped by this process's limit on file sizes. No memory is taken now. Raises OSError."""
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


# ---- memory that all ranks write to


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
        """Close the descriptor: no further process can open the memory. Processes that have
        opened it keep it. A second call does nothing."""
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


# ---- tensors in a file


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Place of a tensor in the file: its first byte, dtype and shape."""

    start: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def end(self) -> int:
        """The byte after the tensor."""
        return self.start + math.prod(self.shape) * self.dtype.itemsize

    def of(self, bytes_N: Tensor) -> Tensor:
        """Return the tensor as a view of the bytes of the file."""
        return bytes_N[self.start : self.end].view(self.dtype).view(self.shape)


class SharedTensors(dict[str, Tensor]):
    """Tensors by name, read-only views of the file at `address`.

    While a view lives, the file is not written, and other ranks can open it.
    """

    def __init__(self, address: str, places: Mapping[str, Place]) -> None:
        """Open the file at `address` of a live process. Raises WeightUpdateError."""
        try:
            descriptor = os.open(address, os.O_RDONLY | os.O_CLOEXEC)
            num_bytes = max((place.end for place in places.values()), default=0)
            self._map(descriptor, max(1, num_bytes), places)
        except (OSError, ValueError) as error:
            raise WeightUpdateError(
                f"the weights at {address} cannot be opened: {error}"
            ) from error

    @classmethod
    def of_descriptor(
        cls, descriptor: int, num_bytes: int, places: Mapping[str, Place]
    ) -> SharedTensors:
        """Map the first bytes of an open file. Takes the descriptor.

        Raises OSError and ValueError if the file cannot be mapped or a writer holds it.
        """
        shared = cls.__new__(cls)
        shared._map(descriptor, num_bytes, places)
        return shared

    def _map(self, descriptor: int, num_bytes: int, places: Mapping[str, Place]) -> None:
        try:
            lock_for_reading(descriptor)
        except BaseException:
            os.close(descriptor)
            raise
        bytes_N = map_for_reading(descriptor, num_bytes)
        self.address, self.places = f"/proc/{os.getpid()}/fd/{descriptor}", places
        for name, place in places.items():
            try:
                self[name] = place.of(bytes_N)
            # The dtype does not divide the bytes, or the shape is too large to count.
            except RuntimeError as error:
                raise WeightUpdateError(f"{name!r} cannot lie at {place}: {error}") from error


class TensorFile:
    """Writes tensors to an anonymous file, each at a multiple of 64 bytes, recorded in `places`.

    Other processes can open it by `address`, once all tensors are written, until `close`.
    """

    def __init__(self, name: str, flags: int = 0) -> None:
        """`flags`: flags of memfd_create beside MFD_CLOEXEC. Raises ConfigError where the system
        has no memfd_create, OSError without memory.
        """
        if not hasattr(os, "memfd_create"):
            raise ConfigError("shared memory for weights needs Linux (memfd_create)")
        self.descriptor = os.memfd_create(name, os.MFD_CLOEXEC | flags)
        try:
            self._file = MappedFile(self.descriptor, _memory_bytes())
        except BaseException:
            os.close(self.descriptor)
            raise
        self.places, self.num_bytes = dict[str, Place](), 0
        self.address = f"/proc/{os.getpid()}/fd/{self.descriptor}"

    def begin(self, first: int = 0) -> None:
        """Start over: drop all places. The next tensor lies at byte `first` or later."""
        self.places, self.num_bytes = {}, first

    def room_for(self, name: str, values: Tensor) -> Tensor:
        """Return memory for a tensor like `values`, and record its place. Raises OSError."""
        start = -(-self.num_bytes // _ALIGNMENT) * _ALIGNMENT
        place = Place(start=start, dtype=values.dtype, shape=tuple(values.shape))
        bytes_N = self.bytes_at(start, place.end - start)
        self.places[name], self.num_bytes = place, place.end
        return bytes_N.view(place.dtype).view(place.shape)

    def bytes_at(self, start: int, num_bytes: int) -> Tensor:
        """Return bytes of the file for writing, uint8 [num_bytes]. Raises OSError without room."""
        return self._file.room(start, num_bytes)

    def cut(self) -> None:
        """Set the file's size to the size of its tensors, at least 1: an empty file cannot be
        mapped. Raises OSError."""
        self._file.cut(max(1, self.num_bytes))

    def close(self) -> None:
        """Close the file, so that no further process can open it. May be called once."""
        os.close(self.descriptor)


def write_shared(tensors: Iterable[tuple[str, Tensor]]) -> SharedTensors:
    """Copy tensors, one after the other, from any device to shared memory.

    Raises ConfigError where there is no shared memory, OSError without room.
    """
    file = TensorFile("rollout-staging")
    try:
        for name, tensor in tensors:
            file.room_for(name, tensor).copy_(tensor.detach())
        file.cut()
        return SharedTensors(file.address, file.places)
    finally:
        file.close()


def _memory_bytes() -> int:
    """Return the memory of this machine, which bounds a file in memory."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
