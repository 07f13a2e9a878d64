"""SharedTransport: one copy of the weights in shared memory, for all engines of a machine.

The memory is an anonymous file (memfd, Linux only), which the system frees when the trainer and all
readers have closed it. A released file is kept and reused by a later push. A reader locks the file
while it has a view of a tensor, and a push never rewrites a locked file. Used by
`rollout.weights.transports.registry`.
"""

from __future__ import annotations

import math
import os
import re
import stat
import uuid
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from rollout.errors import ConfigError, WeightUpdateError
from rollout.parallel.shared_memory import (
    Place,
    SharedTensors,
    TensorFile,
    lock_for_reading,
    lock_for_writing,
    unlock,
)
from rollout.weights.source import TensorEntry, WeightsSource, pack_manifest
from rollout.weights.transports.base import KeptTransport
from rollout.weights.transports.reading import TensorReader, terms_of
from rollout.weights.update import NamedTensors

_NAME = "rollout-weights"
_ADDRESS = re.compile(r"(/proc/[0-9]+/fd/[0-9]+) ([0-9a-f]{32})")
_ID_BYTES = 32  # the id of the push, at the beginning of a file


@dataclass(frozen=True, slots=True)
class _Segment:
    file: TensorFile
    source: WeightsSource


class SharedTransport(KeptTransport[_Segment]):
    """A WeightTransport whose `publish` copies the tensors to shared memory, which engines map."""

    kind = "shared"

    def __init__(self, *, reject_non_finite: bool = True, reuses_memory: bool = True) -> None:
        """`reuses_memory` keeps one released file for a later push. Otherwise released files are
        closed."""
        self._reader = TensorReader(reject_non_finite=reject_non_finite)
        self._reuses_memory = reuses_memory
        # A released file, which may have readers: new memory would cost more than the copy.
        self._spare: TensorFile | None = None
        super().__init__(lambda segment: self._keep_spare(segment.file))

    def publish(self, named_tensors: NamedTensors) -> WeightsSource:
        """Copy tensors from any device to shared memory, and return their source. Raises
        WeightUpdateError as WeightTransport says, and on systems other than Linux."""
        self.roll_back()
        lora = terms_of(named_tensors)
        push_id = uuid.uuid4().hex
        file = None
        try:
            file = self._file_to_write()
            file.begin(_ID_BYTES)
            checksum = self._reader.read_into(named_tensors, file.room_for)
            file.cut()
            _write_id(file, push_id)
            unlock(file.descriptor)
        except ConfigError as error:
            raise WeightUpdateError(
                f"{error}; use LLM without use_coordinator, which needs no shared memory"
            ) from error
        except BaseException as error:
            if file is not None:
                file.close()
            if not isinstance(error, OSError):
                raise
            raise WeightUpdateError(
                f"no shared memory for weights ({error}); free memory, or use another "
                "weight_transport"
            ) from error
        source = WeightsSource(
            kind=self.kind,
            address=f"{file.address} {push_id}",
            manifest=pack_manifest({n: _entry(place) for n, place in file.places.items()}),
            checksum="",
            tensors_checksum=checksum,
            lora=lora,
        )
        return self._begin(_Segment(file, source))

    def close(self) -> None:
        """Release all weights and their memory. A second call does nothing."""
        self._reuses_memory = False
        super().close()
        spare, self._spare = self._spare, None
        if spare is not None:
            spare.close()

    def _file_to_write(self) -> TensorFile:
        """Return a file locked for writing: the spare file if it has no reader, else a new file."""
        if self._spare is not None and lock_for_writing(self._spare.descriptor):
            file, self._spare = self._spare, None
            return file
        file = TensorFile(_NAME)
        lock_for_writing(file.descriptor)
        return file

    def _keep_spare(self, released: TensorFile) -> None:
        """Keep a released file as the spare, and close the previous spare. Without memory reuse,
        close the released file instead."""
        _write_id(released, "")  # new readers must not begin to read it
        old: TensorFile | None = released
        if self._reuses_memory:
            old, self._spare = self._spare, released
        if old is not None:
            old.close()


def fetch_shared(source: WeightsSource) -> SharedTensors:
    """Return the tensors of `source`, on the CPU, as views of its mapped memory. The other ranks of
    an engine can open the result, too. Raises WeightUpdateError if the source was released, is not
    a SharedTransport's file, or does not fit its manifest."""
    entries = source.entries()
    try:
        shared, size = _open(source.address, entries)
    except (OSError, ValueError) as error:
        raise WeightUpdateError(
            f"the weights at {source.address!r} cannot be opened ({error}); check that the trainer "
            "is running"
        ) from error
    expected = max((e.offset + e.num_bytes for e in entries.values()), default=_ID_BYTES)
    if size != expected:
        raise WeightUpdateError(
            f"the file at {source.address!r} has {size} bytes, not {expected} as its manifest says"
        )
    return shared


def _open(address: str, entries: Mapping[str, TensorEntry]) -> tuple[SharedTensors, int]:
    """Return the tensors and their file's size. Raises OSError, ValueError, WeightUpdateError."""
    parts = _ADDRESS.fullmatch(address)
    if parts is None:
        raise FileNotFoundError("this is not an address of a SharedTransport")
    path, push_id = parts.groups()
    # Non-blocking, because another file may be there now: opening a pipe waits for its writer.
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        size = _size_of(descriptor)
        lock_for_reading(descriptor)
        if os.pread(descriptor, _ID_BYTES, 0) != push_id.encode():
            raise FileNotFoundError("they were released for newer ones")
        places = {name: _place(name, entry, size) for name, entry in entries.items()}
        kept = os.dup(descriptor)
    except BlockingIOError as error:
        raise FileNotFoundError("they were released for newer ones") from error
    finally:
        os.close(descriptor)
    return SharedTensors.of_descriptor(kept, size, places), size


def _entry(place: Place) -> TensorEntry:
    return TensorEntry(
        dtype=str(place.dtype).removeprefix("torch."),
        shape=place.shape,
        offset=place.start,
        num_bytes=place.end - place.start,
    )


def _write_id(file: TensorFile, push_id: str) -> None:
    id_N = bytearray(push_id.encode().ljust(_ID_BYTES))
    file.bytes_at(0, _ID_BYTES).copy_(torch.frombuffer(id_N, dtype=torch.uint8))


def _size_of(descriptor: int) -> int:
    """Return the size in bytes of a SharedTransport's file. Raises OSError for any other file."""
    status = os.fstat(descriptor)
    # The address may belong to another file by now: the system reuses descriptor numbers.
    is_named = os.readlink(f"/proc/self/fd/{descriptor}") == f"/memfd:{_NAME} (deleted)"
    if not is_named or not stat.S_ISREG(status.st_mode):
        raise FileNotFoundError("they were released for newer ones")
    return status.st_size


def _place(name: str, entry: TensorEntry, size: int) -> Place:
    """Return the place of a manifest's tensor in a file of `size` bytes. Raises WeightUpdateError
    if the tensor does not fit."""
    dtype, end = getattr(torch, entry.dtype, None), entry.offset + entry.num_bytes
    if (
        not isinstance(dtype, torch.dtype)
        or end > size
        or math.prod(entry.shape) * dtype.itemsize != entry.num_bytes
    ):
        raise WeightUpdateError(
            f"{name!r} cannot be at bytes [{entry.offset}, {end}) of {size} as {entry.dtype} "
            f"{list(entry.shape)}"
        )
    return Place(start=entry.offset, dtype=dtype, shape=tuple(entry.shape))
