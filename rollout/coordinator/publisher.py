"""WeightPublisher: one copy of the weights in shared memory, for all engines of a machine.

The memory belongs to an anonymous file: it has no name that could be left behind, and is gone when
the publisher and all who mapped it are, however they ended. Linux only.
"""

from __future__ import annotations

import math
import mmap
import os
import uuid
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from rollout.coordinator.protocol.messages import TensorEntry, WeightsSource
from rollout.errors import WeightUpdateError
from rollout.models.plain_tensors import full_tensor, refusal
from rollout.runner.weight_update import NamedTensors, by_name

KIND = "shared"
_ALIGNMENT = 64  # bytes


@dataclass(frozen=True, slots=True)
class _Segment:
    descriptor: int
    source: WeightsSource


class WeightPublisher:
    """Keeps the last committed weights fetchable, and those of an update under way."""

    def __init__(self) -> None:
        self._committed: _Segment | None = None
        self._pending: _Segment | None = None

    @property
    def committed(self) -> WeightsSource | None:
        """Where the last committed weights are; None before the first."""
        return None if self._committed is None else self._committed.source

    def publish(self, named_tensors: NamedTensors, checksum: str = "") -> WeightsSource:
        """Copy tensors, on whatever device, into a new segment; `commit` or `drop` it next.

        `checksum`: as an engine will report it, empty if that is not known. Sharded tensors are
        gathered one by one, in the order of their names, which is a collective of all ranks.
        Raises WeightUpdateError naming the tensor that cannot be copied, if there is no memory, and
        on other systems than Linux.
        """
        if not hasattr(os, "memfd_create"):
            raise WeightUpdateError(
                "shared memory for weights needs Linux (memfd_create); use LLM without "
                "use_coordinator, which takes them in its own process"
            )
        self.drop()
        tensors = by_name(named_tensors)
        manifest, num_bytes = _layout(tensors)
        name = f"rollout-weights-{uuid.uuid4().hex}"
        descriptor = os.memfd_create(name, os.MFD_CLOEXEC)
        try:
            os.ftruncate(descriptor, max(1, num_bytes))
            with mmap.mmap(descriptor, max(1, num_bytes)) as region:
                _write(region, tensors, manifest)
        except (OSError, ValueError) as error:
            os.close(descriptor)
            raise WeightUpdateError(
                f"no shared memory for {num_bytes} bytes of weights ({error}); free some, or push "
                "to each engine by itself"
            ) from error
        except BaseException:
            os.close(descriptor)
            raise
        source = WeightsSource(
            kind=KIND,
            address=f"/proc/{os.getpid()}/fd/{descriptor} {name}",
            manifest=manifest,
            checksum=checksum,
        )
        self._pending = _Segment(descriptor, source)
        return source

    def commit(self) -> None:
        """The published weights are served: keep them, and give those before them up."""
        if self._pending is not None:
            _close(self._committed)
            self._committed, self._pending = self._pending, None

    def drop(self) -> None:
        """The published weights were refused."""
        _close(self._pending)
        self._pending = None

    def close(self) -> None:
        """Give all up. Twice is fine."""
        self.drop()
        _close(self._committed)
        self._committed = None


def fetch_weights(source: WeightsSource) -> dict[str, Tensor]:
    """The tensors of `source`, on the CPU: views of its memory, which lives as long as they do.

    Raises WeightUpdateError if it is not there any more, or smaller than its manifest says.
    """
    if source.kind != KIND:
        raise WeightUpdateError(
            f"weights of kind {source.kind!r} cannot be fetched here; only {KIND!r} can"
        )
    path, _, file_name = source.address.partition(" ")
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            # A descriptor's number is used again once it is closed.
            if file_name not in os.readlink(f"/proc/self/fd/{descriptor}"):
                raise FileNotFoundError("they were given up for newer ones")
            size = os.fstat(descriptor).st_size
            # Private: torch wants writable memory, and the publisher's must not be written to.
            region = mmap.mmap(descriptor, size, flags=mmap.MAP_PRIVATE)
        finally:
            os.close(descriptor)
    except (OSError, ValueError) as error:
        raise WeightUpdateError(
            f"the weights at {source.address!r} cannot be had ({error}); is their publisher alive?"
        ) from error
    bytes_N = torch.frombuffer(region, dtype=torch.uint8)
    return {name: _view(bytes_N, name, entry) for name, entry in source.manifest.items()}


def _layout(tensors: Mapping[str, Tensor]) -> tuple[dict[str, TensorEntry], int]:
    """(where each tensor goes, bytes in all). Raises WeightUpdateError for an unreadable one."""
    manifest: dict[str, TensorEntry] = {}
    end = 0
    for name, tensor in tensors.items():
        if reason := refusal(tensor):
            raise WeightUpdateError(f"{name!r} {reason}")
        start = -(-end // _ALIGNMENT) * _ALIGNMENT
        end = start + tensor.nbytes
        manifest[name] = TensorEntry(
            dtype=str(tensor.dtype).removeprefix("torch."),
            shape=tuple(tensor.shape),
            offset=start,
            num_bytes=tensor.nbytes,
        )
    return manifest, end


@torch.no_grad()
def _write(
    region: mmap.mmap, tensors: Mapping[str, Tensor], manifest: Mapping[str, TensorEntry]
) -> None:
    bytes_N = torch.frombuffer(region, dtype=torch.uint8)
    try:
        for name in sorted(tensors):  # all ranks of a trainer gather in this order
            try:
                view = _view(bytes_N, name, manifest[name])
                view.copy_(full_tensor(tensors[name]))
            except (RuntimeError, TypeError) as error:
                raise WeightUpdateError(f"copying {name!r} failed: {error}") from error
            del view
    finally:
        del bytes_N  # the mapping cannot be closed before


def _view(bytes_N: Tensor, name: str, entry: TensorEntry) -> Tensor:
    """Raises WeightUpdateError naming the tensor that cannot lie there."""
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


def _close(segment: _Segment | None) -> None:
    if segment is not None:
        os.close(segment.descriptor)
