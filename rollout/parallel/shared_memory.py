"""Files mapped into the memory of several processes of one machine. Linux only.

Used by `rollout.models.checkpoints.writer` and `rollout.weights.transports.shared` (MappedFile,
TensorFile and locks), by `rollout.backends.process_groups` and
`rollout.parallel.shared_collectives` (SharedMemory), and by `rollout.tensor_parallel.update_source`
(SharedTensors). It creates anonymous files, and writes and locks files.
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
    """A file that is written through mapped memory, and rewritten without mapping it again. The
    caller owns and closes the file's descriptor."""

    def __init__(self, descriptor: int, capacity: int) -> None:
        """Map an open, empty file, which may grow to `capacity` bytes. Takes no memory yet. The
        process's limit on file sizes lowers the capacity. Raises OSError."""
        self._descriptor = descriptor
        limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
        if limit != resource.RLIM_INFINITY:
            capacity = min(capacity, limit)
        os.ftruncate(descriptor, capacity)
        # Rewriting reuses the pages: in a new file faults and zeroing take longer than copying.
        self._bytes_N = torch.frombuffer(mmap.mmap(descriptor, capacity), dtype=torch.uint8)
        os.ftruncate(descriptor, 0)
        self._num_allocated = 0

    def room(self, start: int, num_bytes: int) -> Tensor:
        """Return bytes [start, start + num_bytes) of the file for writing: uint8 [num_bytes].
        Raises OSError if there is no memory for them, or if they are beyond the capacity."""
        # Memory is allocated first: a write without memory would kill the process.
        end = start + num_bytes
        if end > self._num_allocated:
            capacity = len(self._bytes_N)
            if end > capacity:
                raise OSError(f"{end} bytes are more than the file's capacity of {capacity}")
            growth = min(max(self._num_allocated, _LEAST_GROWTH), _LARGEST_GROWTH)
            try:
                self._allocate(min(max(end, self._num_allocated + growth), capacity))
            except OSError:  # there may be memory for less
                self._allocate(end)
        return self._bytes_N[start:end]

    def _allocate(self, end: int) -> None:
        num_allocated = self._num_allocated
        os.posix_fallocate(self._descriptor, num_allocated, end - num_allocated)
        self._num_allocated = end

    def cut(self, num_bytes: int) -> None:
        """Set the size of the file to `num_bytes`, at least 1. Raises OSError."""
        self.room(0, num_bytes)  # allocates memory for every byte
        os.ftruncate(self._descriptor, num_bytes)
        self._num_allocated = num_bytes


def lock_for_reading(descriptor: int) -> None:
    """Take a shared lock, which is held until every copy of the descriptor is closed. Raises
    BlockingIOError if a writer holds the lock."""
    fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)


def lock_for_writing(descriptor: int) -> bool:
    """Take the exclusive lock until `unlock`. Returns False if a reader or a writer holds a
    lock."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def unlock(descriptor: int) -> None:
    fcntl.flock(descriptor, fcntl.LOCK_UN)


def map_for_reading(descriptor: int, num_bytes: int) -> Tensor:
    """Return a view of the first bytes of a file, uint8 [num_bytes]. Writes do not reach the file.
    Takes over the descriptor and its lock, and closes the descriptor when the last view is gone.
    Raises OSError or ValueError, and closes the descriptor, if the file cannot be mapped."""
    try:
        # Private: torch needs writable memory, but the file must not be written to.
        region = mmap.mmap(descriptor, num_bytes, flags=mmap.MAP_PRIVATE)
    except BaseException:
        os.close(descriptor)
        raise
    weakref.finalize(region, os.close, descriptor)
    return torch.frombuffer(region, dtype=torch.uint8)


# ---- memory that all ranks write to


class SharedMemory:
    """Memory that several processes of one machine share. Linux only. `bytes_N`, uint8, is the same
    memory in all processes that opened `address`. The system frees the memory when the last process
    has ended."""

    def __init__(self, num_bytes: int) -> None:
        """Map `num_bytes` zero bytes. Pages take memory when they are written to. Raises
        ConfigError if the system has no memfd_create or no memory."""
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
            raise ConfigError(
                f"cannot allocate {num_bytes} bytes of shared memory ({error}); free some memory"
            ) from error
        self.address = f"/proc/{os.getpid()}/fd/{self._descriptor}"

    def close(self) -> None:
        """Close the descriptor, so that no further process can open the memory. Processes that have
        opened the memory keep it. A second call does nothing."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def open_shared(address: str) -> Tensor:
    """Return the bytes of the SharedMemory at `address`. The process that made it must be running,
    and must not have closed it. Raises LockstepError if the memory cannot be opened."""
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
    """Place of a tensor in a file. `start` is the offset of its first byte."""

    start: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def end(self) -> int:
        """Offset of the byte after the tensor."""
        return self.start + math.prod(self.shape) * self.dtype.itemsize

    def of(self, bytes_N: Tensor) -> Tensor:
        """Return the tensor as a view of the file's bytes."""
        return bytes_N[self.start : self.end].view(self.dtype).view(self.shape)


class SharedTensors(dict[str, Tensor]):
    """Tensors by name, which are views of `places` in the file at `address`. Writes do not reach
    the file. A shared lock is held while a view exists, so that the writer does not rewrite the
    file. Other processes can open the file meanwhile."""

    def __init__(self, address: str, places: Mapping[str, Place]) -> None:
        """Map the TensorFile at `address`, which must still be open. Raises WeightUpdateError
        if the file cannot be opened or is being written."""
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
        """Map the first `num_bytes` of an open file. Takes over the descriptor. Raises OSError or
        ValueError if the file cannot be mapped or a writer holds its lock. Raises WeightUpdateError
        if a place does not fit the file."""
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
            except RuntimeError as error:  # misaligned, or beyond the end of the file
                raise WeightUpdateError(f"{name!r} cannot be at {place}: {error}") from error


class TensorFile:
    """Allocates tensors in an anonymous file, at multiples of 64 bytes, and records their
    `places`. After `cut` and until `close`, other processes can open the file by `address`."""

    def __init__(self, name: str, flags: int = 0) -> None:
        """Create the file. `flags` are flags of memfd_create in addition to MFD_CLOEXEC. Raises
        ConfigError if the system has no memfd_create, and OSError if the file cannot be made or
        mapped."""
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
        """Drop all places, to rewrite the file. The next tensor is put at byte `first` or later."""
        self.places, self.num_bytes = {}, first

    def room_for(self, name: str, values: Tensor) -> Tensor:
        """Return memory with the dtype and shape of `values`, and record its place under `name`.
        The caller writes the values. Raises OSError if there is no memory."""
        start = -(-self.num_bytes // _ALIGNMENT) * _ALIGNMENT
        place = Place(start=start, dtype=values.dtype, shape=tuple(values.shape))
        bytes_N = self.bytes_at(start, place.end - start)
        self.places[name], self.num_bytes = place, place.end
        return bytes_N.view(place.dtype).view(place.shape)

    def bytes_at(self, start: int, num_bytes: int) -> Tensor:
        """Return bytes [start, start + num_bytes) of the file for writing, uint8. Raises OSError if
        there is no memory."""
        return self._file.room(start, num_bytes)

    def cut(self) -> None:
        """Set the file's size to the end of its last tensor, at least 1 byte. Raises OSError."""
        self._file.cut(max(1, self.num_bytes))

    def close(self) -> None:
        """Close the file, so that no further process can open it. Call once."""
        os.close(self.descriptor)


def write_shared(tensors: Iterable[tuple[str, Tensor]]) -> SharedTensors:
    """Copy named tensors from any device to a new TensorFile, and return views of the copies.
    Raises ConfigError if the system has no shared memory, and OSError if there is no memory."""
    file = TensorFile("rollout-staging")
    try:
        for name, tensor in tensors:
            file.room_for(name, tensor).copy_(tensor.detach())
        file.cut()
        return SharedTensors(file.address, file.places)
    finally:
        file.close()


def _memory_bytes() -> int:
    """Return this machine's memory in bytes, which bounds a file in memory."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
