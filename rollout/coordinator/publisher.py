"""WeightPublisher: one copy of the weights in shared memory, for all engines of a machine.

The memory belongs to an anonymous file. It has no name that could be left behind, and the system
frees it when the publisher and all readers have ended. Once filled it is sealed: nobody can change
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
from typing import Any

import torch
from msgspec import structs
from torch import Tensor

from rollout.backends.base import Ops
from rollout.backends.cpu import cpu_backend
from rollout.coordinator.protocol.messages import LoraTerms, TensorEntry, WeightsSource
from rollout.errors import WeightUpdateError
from rollout.models.lora import LoraAdapter
from rollout.models.plain_tensors import full_tensor, refusal
from rollout.models.weights import is_computed
from rollout.runner.weight_update import (
    Fingerprint,
    NamedTensors,
    by_name,
    checksum_of,
    hashed_dtype,
)

KIND = "shared"
_ALIGNMENT = 64  # bytes
_DESCRIPTOR = re.compile(r"/proc/[0-9]+/fd/[0-9]+")
_NAME = re.compile(r"rollout-weights-[0-9a-f]+")


@dataclass(frozen=True, slots=True)
class _Segment:
    descriptor: int
    source: WeightsSource


class WeightPublisher:
    """Publishes the last committed weights, and those of a running update.

    While adapters are committed, the full weights below them stay for engines that come late.
    """

    def __init__(self, *, reject_non_finite: bool = True) -> None:
        self._reject_non_finite = reject_non_finite
        self._ops: Ops | None = None  # made when it is needed, which may compile its kernels
        self._committed: _Segment | None = None
        self._base: _Segment | None = None  # the full weights that a committed adapter belongs to
        self._pending: _Segment | None = None

    @property
    def committed(self) -> WeightsSource | None:
        """The source of the last committed weights; None before the first commit."""
        return None if self._committed is None else self._committed.source

    def publish(self, named_tensors: NamedTensors) -> WeightsSource:
        """Copy tensors, on whatever device, into a new segment; `commit` or `drop` it next.

        Sharded tensors are gathered one by one, in the order of their names, which is a collective
        of all ranks. Of an adapter only A and B are copied: each engine merges them. Raises
        WeightUpdateError naming the tensor that cannot be copied or holds NaN or infinity, if there
        is no memory, and on other systems than Linux.
        """
        if not hasattr(os, "memfd_create"):
            raise WeightUpdateError(
                "shared memory for weights needs Linux (memfd_create); use LLM without "
                "use_coordinator, which takes them in its own process"
            )
        self.drop()
        lora = _terms(named_tensors) if isinstance(named_tensors, LoraAdapter) else None
        tensors = {n: tensor for n, tensor in by_name(named_tensors).items() if not is_computed(n)}
        manifest, num_bytes = _layout(tensors)
        name = f"rollout-weights-{uuid.uuid4().hex}"
        descriptor = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        with contextlib.ExitStack() as undo:
            undo.callback(os.close, descriptor)
            try:
                os.ftruncate(descriptor, max(1, num_bytes))
                fingerprints = self._write(descriptor, tensors, manifest)
                fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _seals())
            except OSError as error:
                raise WeightUpdateError(
                    f"no shared memory for {num_bytes} bytes of weights ({error}); free some, or "
                    "push to each engine by itself"
                ) from error
            undo.pop_all()
        source = WeightsSource(
            kind=KIND,
            address=f"/proc/{os.getpid()}/fd/{descriptor} {name}",
            manifest=manifest,
            checksum="",
            tensors_checksum=checksum_of(fingerprints),
            lora=lora,
        )
        self._pending = _Segment(descriptor, source)
        return source

    @torch.no_grad()
    def _write(
        self, descriptor: int, tensors: Mapping[str, Tensor], manifest: Mapping[str, TensorEntry]
    ) -> dict[str, Fingerprint]:
        """Copy the tensors into the file, and return their fingerprints. Raises WeightUpdateError.

        By `pwrite`: a new file that is mapped costs a page fault and zeros for each 4 KiB, which
        takes three times as long. To the end, whatever the values are: the other ranks of a
        trainer gather each tensor, too.
        """
        self._ops = self._ops or cpu_backend("device").ops
        fingerprints: dict[str, Fingerprint] = {}
        for name in sorted(tensors):  # all ranks of a trainer gather in this order
            try:
                values = full_tensor(tensors[name]).detach().cpu().contiguous()
                _write_all(descriptor, values, manifest[name].offset)
                fingerprint = self._ops.fingerprint(values, hashed_dtype(values.dtype))
            except (RuntimeError, TypeError, KeyError) as error:
                raise WeightUpdateError(f"copying {name!r} failed: {error}") from error
            fingerprints[name] = fingerprint.tolist()
        bad = [name for name, (_, num_bad) in fingerprints.items() if num_bad]
        if bad and self._reject_non_finite:
            more = f", as do {len(bad) - 1} others" if len(bad) > 1 else ""
            raise WeightUpdateError(
                f"{bad[0]!r} holds NaN or infinity{more}; the serving weights are kept. "
                "reject_non_finite_weights=False would let it pass"
            )
        return fingerprints

    def commit(self) -> None:
        """The published weights are served: keep them, and release the earlier ones."""
        if self._pending is None:
            return
        before, self._committed, self._pending = self._committed, self._pending, None
        if self._committed.source.lora is None:
            _close(self._base)
            self._base = None
        elif before is not None and before.source.lora is None:
            self._base, before = before, None
        _close(before)

    def drop(self) -> None:
        """The published weights were refused: release them."""
        _close(self._pending)
        self._pending = None

    def close(self) -> None:
        """Release all weights. A second call does nothing."""
        self.drop()
        _close(self._committed)
        _close(self._base)
        self._committed = self._base = None


def fetch_weights(source: WeightsSource) -> dict[str, Tensor] | LoraAdapter:
    """The tensors of `source`, on the CPU: views of its memory, which lives as long as they do. An
    adapter comes as such.

    Raises WeightUpdateError if the source does not exist any more, is not a sealed file of a
    WeightPublisher, or does not have the size that its manifest says.
    """
    if source.kind != KIND:
        raise WeightUpdateError(
            f"weights of kind {source.kind!r} cannot be fetched here; only {KIND!r} can"
        )
    path, _, name = source.address.partition(" ")
    try:
        if not _DESCRIPTOR.fullmatch(path) or not _NAME.fullmatch(name):
            raise FileNotFoundError("this is not an address of a WeightPublisher")
        # Whatever is there now: opening a pipe, say, must not wait for who fills it.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            size = _sealed_size(descriptor, name)
            # Private: torch wants writable memory, and the publisher's must not be written to.
            region = mmap.mmap(descriptor, size, flags=mmap.MAP_PRIVATE)
        finally:
            os.close(descriptor)
    except (OSError, ValueError) as error:
        raise WeightUpdateError(
            f"the weights at {source.address!r} cannot be opened ({error}); is the publisher alive?"
        ) from error
    bytes_N = torch.frombuffer(region, dtype=torch.uint8)
    tensors = {name: _view(bytes_N, name, entry) for name, entry in source.manifest.items()}
    expected = max((e.offset + e.num_bytes for e in source.manifest.values()), default=0)
    if size != max(1, expected):
        raise WeightUpdateError(
            f"the file at {source.address!r} has {size} bytes, not {expected} as its manifest says"
        )
    if source.lora is None:
        return tensors
    return LoraAdapter(tensors=tensors, **structs.asdict(source.lora))


def _terms(adapter: LoraAdapter) -> LoraTerms:
    """Raises WeightUpdateError naming a tensor that is no half of a pair."""
    if adapter.base is not None:
        raise WeightUpdateError(
            "an adapter with a base is for an engine in this process; push the base by itself, "
            "then the adapter without it"
        )
    adapter.pairs()
    return LoraTerms(
        rank=adapter.rank,
        alpha=float(adapter.alpha),
        use_rslora=adapter.use_rslora,
        ranks=dict(adapter.ranks),
        alphas={module: float(alpha) for module, alpha in adapter.alphas.items()},
    )


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


def _layout(tensors: Mapping[str, Tensor]) -> tuple[dict[str, TensorEntry], int]:
    """Return (manifest, total bytes). Raises WeightUpdateError for an unreadable tensor."""
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


def _write_all(descriptor: int, values: Tensor, offset: int) -> None:
    bytes_N: Any = values.reshape(-1).view(torch.uint8).numpy()
    left = memoryview(bytes_N)
    while left:
        num_written = os.pwrite(descriptor, left, offset)  # at most 2 GiB
        left, offset = left[num_written:], offset + num_written


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


def _close(segment: _Segment | None) -> None:
    if segment is not None:
        os.close(segment.descriptor)
