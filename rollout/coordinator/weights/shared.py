"""SharedTransport: one copy of the weights in shared memory, for all engines of a machine.

The memory belongs to an anonymous file. It has no name that could be left behind, and the system
frees it when the trainer and all readers have ended. Once filled it is sealed: nobody can change
its bytes or its size. Linux only.
"""

from __future__ import annotations

import contextlib
import fcntl
import math
import mmap
import os
import re
import stat
import uuid
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from rollout.coordinator.protocol.weights_source import TensorEntry, WeightsSource
from rollout.coordinator.weights.kept import KeptTransport
from rollout.coordinator.weights.reading import TensorReader, terms_of
from rollout.errors import WeightUpdateError
from rollout.parallel.shared_tensors import (
    Place,
    SharedTensors,
    TensorAppender,
    shareable,
)
from rollout.runner.weight_update import NamedTensors

KIND = "shared"
_DESCRIPTOR = re.compile(r"/proc/[0-9]+/fd/[0-9]+")
_NAME = re.compile(r"rollout-weights-[0-9a-f]+")


@dataclass(frozen=True, slots=True)
class _Segment:
    descriptor: int
    source: WeightsSource


class SharedTransport(KeptTransport[_Segment]):
    """A WeightTransport: `publish` makes the copy, which engines map."""

    kind = KIND

    def __init__(self, *, reject_non_finite: bool = True) -> None:
        self._reader = TensorReader(reject_non_finite=reject_non_finite)
        super().__init__(lambda segment: os.close(segment.descriptor))

    def publish(self, named_tensors: NamedTensors) -> WeightsSource:
        """Copy tensors, on whatever device, into a new segment. See WeightTransport.

        Raises WeightUpdateError also if there is no memory, and on other systems than Linux.
        """
        if not hasattr(os, "memfd_create"):
            raise WeightUpdateError(
                "shared memory for weights needs Linux (memfd_create); use LLM without "
                "use_coordinator, which takes them in its own process"
            )
        self.drop()
        lora = terms_of(named_tensors)
        name = f"rollout-weights-{uuid.uuid4().hex}"
        descriptor = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        with contextlib.ExitStack() as undo:
            undo.callback(os.close, descriptor)
            appender = TensorAppender(descriptor)
            try:
                checksum = self._reader.read(named_tensors, appender.write)
                appender.end()
                fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _seals())
            except OSError as error:
                raise WeightUpdateError(
                    f"no shared memory for weights beyond {appender.num_bytes} bytes ({error}); "
                    "free some, or push to each engine by itself"
                ) from error
            undo.pop_all()
        source = WeightsSource(
            kind=KIND,
            address=f"/proc/{os.getpid()}/fd/{descriptor} {name}",
            manifest={name: _entry(place) for name, place in appender.places.items()},
            checksum="",
            tensors_checksum=checksum,
            lora=lora,
        )
        return self._begin(_Segment(descriptor, source))


def fetch_shared(source: WeightsSource) -> SharedTensors:
    """The tensors of `source`, on the CPU: views of its memory, which lives as long as they do. The
    other ranks of an engine can open them, too.

    Raises WeightUpdateError if the source does not exist any more, is not a sealed file of a
    SharedTransport, or does not have the size that its manifest says.
    """
    path, _, name = source.address.partition(" ")
    try:
        if not _DESCRIPTOR.fullmatch(path) or not _NAME.fullmatch(name):
            raise FileNotFoundError("this is not an address of a SharedTransport")
        # Whatever is there now: opening a pipe, say, must not wait for who fills it.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            size = _sealed_size(descriptor, name)
            # Private: torch wants writable memory, and the publisher's must not be written to.
            region = mmap.mmap(descriptor, size, flags=mmap.MAP_PRIVATE)
            bytes_N = torch.frombuffer(region, dtype=torch.uint8)
            views = {name: _view(bytes_N, name, entry) for name, entry in source.manifest.items()}
            tensors = shareable(descriptor, _places(source.manifest, views), views)
        finally:
            os.close(descriptor)
    except (OSError, ValueError) as error:
        raise WeightUpdateError(
            f"the weights at {source.address!r} cannot be opened ({error}); is the publisher alive?"
        ) from error
    expected = max((e.offset + e.num_bytes for e in source.manifest.values()), default=0)
    if size != max(1, expected):
        raise WeightUpdateError(
            f"the file at {source.address!r} has {size} bytes, not {expected} as its manifest says"
        )
    return tensors


def _entry(place: Place) -> TensorEntry:
    return TensorEntry(
        dtype=str(place.dtype).removeprefix("torch."),
        shape=place.shape,
        offset=place.start,
        num_bytes=place.end - place.start,
    )


def _places(manifest: Mapping[str, TensorEntry], views: Mapping[str, Tensor]) -> dict[str, Place]:
    return {
        name: Place(start=entry.offset, dtype=views[name].dtype, shape=tuple(entry.shape))
        for name, entry in manifest.items()
    }


def _seals() -> int:
    """Return the seals against all changes. A function, since only Linux has the constants."""
    return fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


def _sealed_size(descriptor: int, name: str) -> int:
    """Return the size in bytes of a publisher's sealed file. Raises OSError for any other file."""
    status = os.fstat(descriptor)
    # The system reuses the numbers of closed descriptors.
    is_named = os.readlink(f"/proc/self/fd/{descriptor}") == f"/memfd:{name} (deleted)"
    if not is_named or not stat.S_ISREG(status.st_mode):
        raise FileNotFoundError("they were released for newer ones")
    if fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & _seals() != _seals():
        raise PermissionError("the file is not sealed: it could change while it is read")
    return status.st_size


def _view(bytes_N: Tensor, name: str, entry: TensorEntry) -> Tensor:
    """Return the tensor at its manifest's place. Raises WeightUpdateError if it does not fit."""
    dtype, end = getattr(torch, entry.dtype, None), entry.offset + entry.num_bytes
    where = (
        f"{name!r} cannot lie at bytes [{entry.offset}, {end}) of {bytes_N.numel()} as "
        f"{entry.dtype} {list(entry.shape)}"
    )
    if (
        not isinstance(dtype, torch.dtype)
        or end > bytes_N.numel()
        or math.prod(entry.shape) * dtype.itemsize != entry.num_bytes
    ):
        raise WeightUpdateError(where)
    try:
        return bytes_N[entry.offset : end].view(dtype).view(entry.shape)
    except RuntimeError as error:  # an offset between two items, or a shape too large to count
        raise WeightUpdateError(f"{where}: {error}") from error
