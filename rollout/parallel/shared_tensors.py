"""SharedTensors: tensors by name in one anonymous file, for all ranks to read."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from rollout.errors import ConfigError, WeightUpdateError
from rollout.parallel.mapped_file import MappedFile, lock_for_reading, map_for_reading

_ALIGNMENT = 64  # bytes


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
            except (
                RuntimeError
            ) as error:  # a dtype that does not divide the bytes, or a shape too large to count
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
        """Set the file's size to that of its tensors, at least 1: an empty file cannot be mapped.
        Raises OSError."""
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
