"""SharedTensors: tensors by name that lie in one anonymous file, for all ranks to read."""

from __future__ import annotations

import math
import mmap
import os
import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rollout.errors import ConfigError, WeightUpdateError

_ALIGNMENT = 64  # bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a tensor lies: its first byte in the file, dtype and shape."""

    start: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def end(self) -> int:
        return self.start + math.prod(self.shape) * self.dtype.itemsize


class SharedTensors(dict[str, Tensor]):
    """Views of the file at `address`, each at its place. Nobody writes to them."""

    def __init__(self, address: str, places: Mapping[str, Place]) -> None:
        """Open the file, of a process that lives. The tensors live on without it. Raises
        WeightUpdateError."""
        self.address, self.places = address, places
        num_bytes = max((place.end for place in places.values()), default=0)
        try:
            descriptor = os.open(address, os.O_RDONLY | os.O_CLOEXEC)
            try:
                # Private: torch wants writable memory.
                region = mmap.mmap(descriptor, max(1, num_bytes), flags=mmap.MAP_PRIVATE)
            finally:
                os.close(descriptor)
        except (OSError, ValueError) as error:
            raise WeightUpdateError(
                f"the weights at {address} cannot be opened: {error}"
            ) from error
        bytes_N = torch.frombuffer(region, dtype=torch.uint8)
        for name, place in places.items():
            values = bytes_N[place.start : place.end].view(place.dtype)
            self[name] = values.view(place.shape)


def shareable(
    descriptor: int, places: Mapping[str, Place], views: Mapping[str, Tensor]
) -> SharedTensors:
    """`views` of a file that was opened as `descriptor`, each at its place, so that other processes
    can open it for as long as this one keeps them, whatever becomes of the descriptor."""
    kept = os.dup(descriptor)
    shared = SharedTensors.__new__(SharedTensors)
    shared.address, shared.places = f"/proc/{os.getpid()}/fd/{kept}", places
    weakref.finalize(shared, os.close, kept)
    shared.update(views)
    return shared


class TensorAppender:
    """Appends tensors to a file, each at a multiple of 64 bytes; `places` says where they lie.

    By `pwrite`: a new file that is mapped costs a page fault and zeros for each 4 KiB, which takes
    three times as long.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor, self.places, self.num_bytes = descriptor, dict[str, Place](), 0

    def write(self, name: str, values: Tensor) -> None:
        """Append a contiguous tensor of the host. Raises OSError."""
        offset = -(-self.num_bytes // _ALIGNMENT) * _ALIGNMENT
        place = Place(start=offset, dtype=values.dtype, shape=tuple(values.shape))
        bytes_N: Any = values.reshape(-1).view(torch.uint8).numpy()
        left = memoryview(bytes_N)
        while left:
            num_written = os.pwrite(self._descriptor, left, offset)  # at most 2 GiB
            left, offset = left[num_written:], offset + num_written
        self.places[name], self.num_bytes = place, place.end

    def end(self) -> None:
        """Give the file its size, which is not 0: nothing maps an empty one. Raises OSError."""
        os.ftruncate(self._descriptor, max(1, self.num_bytes))


class SharedFile:
    """A file that `SharedTensors` opens, and which this process owns."""

    def __init__(self) -> None:
        """Raises ConfigError where the system has no such files."""
        if not hasattr(os, "memfd_create"):
            raise ConfigError("weights reach several ranks on Linux only (memfd_create)")
        self._descriptor: int | None = os.memfd_create("rollout-staging", os.MFD_CLOEXEC)
        self._address = f"/proc/{os.getpid()}/fd/{self._descriptor}"

    def write(self, tensors: Iterable[tuple[str, Tensor]]) -> SharedTensors:
        """Copy tensors, one after the other, from whatever device. Raises OSError without room."""
        assert self._descriptor is not None
        appender = TensorAppender(self._descriptor)
        for name, tensor in tensors:
            appender.write(name, tensor.detach().cpu().contiguous())
        appender.end()
        return SharedTensors(self._address, appender.places)

    def close(self) -> None:
        """Nobody else can open it from now on. A second call does nothing."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
