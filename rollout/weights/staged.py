"""StagedWeights: an update before its commit, and two ways to write it and to roll it back.

Overwriting copies the new values over the old ones, after a backup. Exchange swaps new and old
values, so that the staged update becomes the backup. ServedWeights creates these objects and
decides when they write. Worker, the executors and Follower pass StagedWeights from `stage` to
`commit`. Writes to the model's weights.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from rollout.layers.weight_slot import WeightSlot
from rollout.models.causal_lm import CausalLM
from rollout.weights.fingerprints import WeightShare
from rollout.weights.memory import ReusedArena, StagingArena, WeightMemory, aligned, rows_within
from rollout.weights.update import blaming


class Replacement(Protocol):
    """Replaces values of weights, and can roll back after any part of them was replaced. Called
    under torch.no_grad()."""

    def reserve(self, num_writes: int) -> None:
        """Allocate memory for `roll_back`. `num_writes` is the number of the update that is served
        now."""
        ...

    def replace(self) -> None:
        """Write the new values in place."""
        ...

    def roll_back(self) -> None:
        """Restore the old values. `replace` may be called again afterwards."""
        ...


@dataclass(slots=True, kw_only=True)
class StagedWeights:
    """A staged update. ServedWeights can commit it until `is_spent`, and changes its fields.

    replacement: writes the new values of weights that are not repacked.
    packed: the result of `Linear.stage` for each layer; [] if `fills_missing`.
    num_writes: number of the committed update that was served when staging began.
    num_bytes: size of the weights that the commit writes.
    bases: the adapted weights without their adapter, by name.
    follows_served: whether the update is an adapter on the weights served at staging.
    fills_missing: whether the weights' values were missing at staging.
    share: this rank's part of the fingerprints.
    checksum: checksum of all weights; "" until `verify` under tensor parallelism.
    is_spent: whether the update was committed and not rolled back.
    replaced: the state before the commit; None unless committed.
    elsewhere: handle of the other ranks' staged parts, set by the TensorParallelExecutor. The other
        ranks drop their parts when it is freed.
    started_at, seconds: start of staging by time.perf_counter(), and its duration.
    """

    replacement: Replacement
    packed: Sequence[Any]
    num_writes: int
    num_bytes: int
    bases: Mapping[str, Tensor]
    follows_served: bool
    fills_missing: bool
    share: WeightShare
    is_spent: bool = False
    replaced: Replaced | None = None
    elsewhere: Any = None
    checksum: str
    is_finite: bool
    started_at: float
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Replaced:
    """The state before a commit, for its rollback. `num_writes` is the commit's number, and
    `num_writes_before` the number of the update served before."""

    num_writes: int
    num_writes_before: int
    packed: PackedCopies
    version: int
    had_values: bool
    was_finite: bool
    bases: Mapping[str, Tensor]


class PackedCopies:
    """The linear layers' packed copies from before a commit, kept for its rollback."""

    def __init__(self, model: CausalLM, staged: Sequence[Any]) -> None:
        """`staged` has the packed copies that replace the present ones."""
        self._layers = list(model.linear_layers().values())
        self._served = [layer.packed for layer in self._layers]
        self._staged = staged

    @torch.no_grad()
    def restore(self) -> None:
        """Make the layers use the old copies again. First restore the weights without packed
        copies."""
        for layer, packed, staged in zip(self._layers, self._served, self._staged, strict=True):
            layer.restore(packed, staged)


# ---- replacement by copies, with a backup


class WeightBackup:
    """A copy of a model's present weights on the CPU. Weights with a packed copy are left out,
    because they are restored from that copy."""

    @torch.no_grad()
    def __init__(self, model: CausalLM) -> None:
        packed = {
            layer.weight.data_ptr()
            for layer in model.linear_layers().values()
            if layer.packed is not None or layer.repacked is not None
        }
        self._plain = [
            (weight, weight.detach().clone())
            for weight in (*model.parameters(), *model.persistent_buffers().values())
            if weight.data_ptr() not in packed
        ]

    def restore(self) -> None:
        for weight, values in self._plain:
            weight.detach().copy_(values)


class HostBackup:
    """A host copy of a model's present weights on a device: the parameters' buffer and the
    persistent buffers."""

    @torch.no_grad()
    def __init__(self, model: CausalLM, memory: WeightMemory, arenas: ReusedArena) -> None:
        """Copy the present weights. Raises ConfigError if the host memory cannot be allocated."""
        self._memory, self._arena = memory, arenas.acquire(self)
        self._bytes_N = self._arena.reserve(memory.num_bytes).copy_(memory.bytes_N)
        self._buffers = [
            (buffer, buffer.detach().to("cpu", copy=True))
            for buffer in model.persistent_buffers().values()
        ]

    def restore(self) -> None:
        self._memory.bytes_N.copy_(self._bytes_N)
        for buffer, values in self._buffers:
            buffer.detach().copy_(values)


class BackupKeeper:
    """Makes the backups of one model's weights. Several staged updates of a device's weights share
    one backup, because the host may lack memory for several copies."""

    def __init__(self, model: CausalLM, memory: WeightMemory, arenas: ReusedArena | None) -> None:
        """`arenas` is host memory for a device's weights; None for a model on the CPU."""
        self._model, self._memory, self._arenas = model, memory, arenas
        self._num_writes = 0
        self._latest: Callable[[], HostBackup | None] = lambda: None

    def backup(self, num_writes: int) -> WeightBackup | HostBackup:
        """Return a backup of the present weights, which update number `num_writes` wrote."""
        if self._arenas is None:
            return WeightBackup(self._model)
        latest = self._latest()
        if latest is None or self._num_writes != num_writes:
            latest = HostBackup(self._model, self._memory, self._arenas)
            self._latest, self._num_writes = weakref.ref(latest), num_writes
        return latest


class Overwriting:
    """`Replacement` that copies tensors in place, and rolls back from a backup."""

    def __init__(
        self,
        slots: Mapping[str, WeightSlot],
        tensors: Mapping[str, Tensor],
        backups: BackupKeeper | None,
        num_writes: int,
        chunk_bytes: int,
    ) -> None:
        """Back up the present weights now, so that the commit stalls for less time.

        `tensors` has the new values by weight name. `backups` is None if the old values are
        missing. Then there is no backup, and a rollback leaves the values missing. `num_writes` is
        as in `reserve`. At most `chunk_bytes`, or one row, are written at once.
        """
        self._slots, self._tensors, self._chunk_bytes = slots, tensors, chunk_bytes
        self._backups = backups
        self._num_writes: int | None = None
        self._backup: WeightBackup | HostBackup | None = None
        self.reserve(num_writes)

    def reserve(self, num_writes: int) -> None:
        if self._backups is not None and self._num_writes != num_writes:
            self._num_writes = self._backup = None  # frees its memory for the next backup
            with blaming("backing up the weights"):
                self._backup = self._backups.backup(num_writes)
            self._num_writes = num_writes

    def replace(self) -> None:
        with blaming() as blame:
            for name, tensor in self._tensors.items():
                blame.culprit = f"copying {name!r}"
                for rows in _row_ranges(name, self._slots[name], tensor, self._chunk_bytes):
                    rows.slot.write(rows.values, rows.first_row)

    def roll_back(self) -> None:
        if self._backups is not None:
            assert self._backup is not None, "no reserve before the commit"
            self._backup.restore()


# ---- replacement by exchange, without a backup


class _RowRange(NamedTuple):
    """Consecutive rows of new values for a weight, from row `first_row`."""

    name: str
    slot: WeightSlot
    values: Tensor
    first_row: int


def _row_ranges(name: str, slot: WeightSlot, values: Tensor, num_bytes: int) -> Iterator[_RowRange]:
    """Yield all rows of `values` in ranges of at most `num_bytes` bytes, but at least one row."""
    num_rows = rows_within(num_bytes, values)
    if num_rows >= len(values):
        yield _RowRange(name, slot, values, 0)
        return
    for index, rows in enumerate(values.split(num_rows)):
        yield _RowRange(name, slot, rows, index * num_rows)


class Exchange:
    """`Replacement` that swaps the update's values on the host with the device's values.

    The staged update becomes the backup, so no second copy is needed. Row ranges pass through a
    bucket on the device. The bucket's halves hold the new and the old rows until both are in place.
    So an error or an interrupt at any point can be rolled back.
    """

    def __init__(
        self,
        slots: Mapping[str, WeightSlot],
        arena: StagingArena,
        values: Mapping[str, Tensor],
        chunk_bytes: int,
        device: torch.device,
    ) -> None:
        """`values` has the new values by weight name, in the weights' dtypes. The values are in
        `arena`, and the exchange overwrites them. Each half of the bucket on `device` has up to
        `chunk_bytes` bytes, or one row."""
        assert all(values[name].dtype == slots[name].dtype for name in values), "a lossy exchange"
        self._device = device
        self._arena = arena  # keeps it alive, so that no other update acquires its memory
        self._ranges = [
            rows
            for name, given in values.items()
            for rows in _row_ranges(name, slots[name], given, chunk_bytes)
            if rows.values.numel()
        ]
        largest = max((rows.values.nbytes for rows in self._ranges), default=0)
        self._half_bytes = aligned(largest)
        self._bucket_HN: Tensor | None = None
        self._num_done = 0
        # The range in flight (the bucket has its old and new rows), and the number done before it.
        self._open: tuple[_RowRange, int] | None = None

    def reserve(self, num_writes: int) -> None:
        """Allocate the bucket, which is kept for a rollback."""
        if self._bucket_HN is None:
            with blaming("allocating the bucket of an update"):
                shape = (2, self._half_bytes)
                self._bucket_HN = torch.empty(shape, dtype=torch.uint8, device=self._device)

    def replace(self) -> None:
        with blaming() as blame:
            for rows in self._ranges[self._num_done :]:
                blame.culprit = f"copying {rows.name!r}"
                self._exchange(rows, self._num_done + 1)
        self._wait()

    def roll_back(self) -> None:
        if self._open is not None:
            rows, self._num_done = self._open
            new, old = self._halves(rows)
            rows.slot.write(old, rows.first_row)
            rows.values.copy_(new, non_blocking=True)
            self._open = None
        for rows in reversed(self._ranges[: self._num_done]):
            self._exchange(rows, self._num_done - 1)
        self._wait()

    def _exchange(self, rows: _RowRange, num_done: int) -> None:
        """Swap one range. Afterwards `num_done` ranges have the new values on the device."""
        new, old = self._halves(rows)
        new.copy_(rows.values, non_blocking=True)
        rows.slot.read_into(old, rows.first_row)
        self._open = rows, self._num_done
        rows.slot.write(new, rows.first_row)
        rows.values.copy_(old, non_blocking=True)
        self._num_done = num_done
        self._open = None

    def _halves(self, rows: _RowRange) -> tuple[Tensor, Tensor]:
        """Return views of the bucket's halves for the new rows and for the old rows."""
        assert self._bucket_HN is not None, "no reserve before the exchange"
        values = rows.values
        new, old = (
            half[: values.nbytes].view(values.dtype).view(values.shape) for half in self._bucket_HN
        )
        return new, old

    def _wait(self) -> None:
        """Wait until the device's copies have ended, so that host memory can be reused."""
        assert self._bucket_HN is not None
        self._bucket_HN[:, :1].cpu()
