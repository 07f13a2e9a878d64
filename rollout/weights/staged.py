"""How the values of an update take the place of those that serve, and how they go back."""

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
from rollout.weights.memory import HostRoom, HostStage, WeightMemory, aligned, rows_within
from rollout.weights.update import blaming


class Replacement(Protocol):
    """Replaces the values of weights, and can go back, whatever part of them it had replaced.

    Called without gradients.
    """

    def prepare(self, num_writes: int) -> None:
        """Have what going back takes. `num_writes`: of the weights that serve now."""
        ...

    def replace(self) -> None:
        """Put the new values in place."""
        ...

    def restore(self) -> None:
        """Put the values back that served before. `replace` may be called again then."""
        ...


# ---- from memory of others, with a backup


class WeightBackup:
    """A copy of the weights that serve now, beside them, for a host.

    It copies only what no packed copy holds: less than all weights where the backend packs them. A
    weight that is packed in its own memory leaves its old values in what was staged for it.
    """

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
        """Write all of them back."""
        for weight, values in self._plain:
            weight.detach().copy_(values)


class HostBackup:
    """A copy, on the host, of the weights that a device serves now: of the one buffer that they lie
    in, and of the persistent buffers, which are small."""

    @torch.no_grad()
    def __init__(self, model: CausalLM, memory: WeightMemory, room: HostRoom) -> None:
        """Raises ConfigError if the memory is not to be had."""
        self._memory, self._arena = memory, room.taken_by(self)
        self._bytes_N = self._arena.reserve(memory.num_bytes).copy_(memory.bytes_N)
        self._buffers = [
            (buffer, buffer.detach().to("cpu", copy=True))
            for buffer in model.persistent_buffers().values()
        ]

    def restore(self) -> None:
        """Write all of them back."""
        self._memory.bytes_N.copy_(self._bytes_N)
        for buffer, values in self._buffers:
            buffer.detach().copy_(values)


class BackupKeeper:
    """Makes the backups of one model's weights: on the host, where a device has the weights.

    Those of the same weights are one there, for a host has room for one more copy, not for several.
    """

    def __init__(self, model: CausalLM, memory: WeightMemory, room: HostRoom | None) -> None:
        """`room` None: the host has the weights."""
        self._model, self._memory, self._room = model, memory, room
        self._num_writes = 0
        self._latest: Callable[[], HostBackup | None] = lambda: None

    def backup(self, num_writes: int) -> WeightBackup | HostBackup:
        """Return a backup of the weights that serve now, after so many writes."""
        if self._room is None:
            return WeightBackup(self._model)
        latest = self._latest()
        if latest is None or self._num_writes != num_writes:
            latest = HostBackup(self._model, self._memory, self._room)
            self._latest, self._num_writes = weakref.ref(latest), num_writes
        return latest


class Overwriting:
    """Implements `Replacement`: copies tensors in place, and goes back to a backup."""

    def __init__(
        self,
        slots: Mapping[str, WeightSlot],
        tensors: Mapping[str, Tensor],
        backups: BackupKeeper,
        num_writes: int,
        piece_bytes: int,
    ) -> None:
        """Backs up the weights that serve after so many writes, outside of the stall. On a device,
        a cast takes memory of its own: of at most `piece_bytes`, or one row."""
        self._slots, self._tensors, self._piece_bytes = slots, tensors, piece_bytes
        self._backups = backups
        self._num_writes: int | None = None
        self._backup: WeightBackup | HostBackup | None = None
        self.prepare(num_writes)

    def prepare(self, num_writes: int) -> None:
        if self._num_writes != num_writes:
            self._num_writes = self._backup = None  # before there is another one
            with blaming("backing up the weights"):
                self._backup = self._backups.backup(num_writes)
            self._num_writes = num_writes

    def replace(self) -> None:
        for name, tensor in self._tensors.items():
            with blaming(f"copying {name!r}"):
                for piece in _pieces(name, self._slots[name], tensor, self._piece_bytes):
                    piece.slot.write(piece.rows, piece.first_row)

    def restore(self) -> None:
        assert self._backup is not None, "no prepare before the commit"
        self._backup.restore()


# ---- from memory of the update's own, by exchange


class _Piece(NamedTuple):
    """Rows of new values, and where they belong in a weight."""

    name: str
    slot: WeightSlot
    rows: Tensor
    first_row: int


def _pieces(name: str, slot: WeightSlot, values: Tensor, num_bytes: int) -> Iterator[_Piece]:
    """All rows of `values`, so many bytes at once, or one row."""
    num_rows = rows_within(num_bytes, values)
    if num_rows >= len(values):
        yield _Piece(name, slot, values, 0)
        return
    for index, rows in enumerate(values.split(num_rows)):
        yield _Piece(name, slot, rows, index * num_rows)


class Exchange:
    """Implements `Replacement`: values on the host and those of the device change places.

    So what was staged becomes the backup, and no second copy is needed. It goes piece by piece
    through a bucket of the device, of which one half has the new rows and one the old ones until
    both are in place. So whatever fails, and wherever it is interrupted, nothing is lost, and the
    pieces that were exchanged can be exchanged again.
    """

    def __init__(
        self,
        slots: Mapping[str, WeightSlot],
        stage: HostStage,
        values: Mapping[str, Tensor],
        piece_bytes: int,
        device: torch.device,
    ) -> None:
        """`values`: of weights by name, in their dtypes; they belong to the exchange, and lie in
        `stage`. Of the bucket, which is on `device`, half has so many bytes, or one row.
        """
        assert all(values[name].dtype == slots[name].dtype for name in values), "a lossy exchange"
        self._device = device
        self._stage = stage  # else another update would be given its room
        self._pieces = [
            piece
            for name, rows in values.items()
            for piece in _pieces(name, slots[name], rows, piece_bytes)
            if piece.rows.numel()
        ]
        self._half_bytes = aligned(max((piece.rows.nbytes for piece in self._pieces), default=0))
        self._bucket_HN: Tensor | None = None
        self._num_done = 0
        # The piece that is half exchanged, of which the bucket has all, and how many were before.
        self._open: tuple[_Piece, int] | None = None

    def prepare(self, num_writes: int) -> None:
        """Have the bucket, which stays until the update goes: going back needs it again."""
        if self._bucket_HN is None:
            with blaming("having the bucket of an update"):
                shape = (2, self._half_bytes)
                self._bucket_HN = torch.empty(shape, dtype=torch.uint8, device=self._device)

    def replace(self) -> None:
        for piece in self._pieces[self._num_done :]:
            with blaming(f"copying {piece.name!r}"):
                self._exchange(piece, self._num_done + 1)
        self._wait()

    def restore(self) -> None:
        if self._open is not None:
            piece, self._num_done = self._open
            self._take_back(piece)
            self._open = None
        for piece in reversed(self._pieces[: self._num_done]):
            self._exchange(piece, self._num_done - 1)
        self._wait()

    def _exchange(self, piece: _Piece, num_done: int) -> None:
        """Exchange one piece; `num_done` are then."""
        new, old = self._halves(piece)
        new.copy_(piece.rows, non_blocking=True)
        piece.slot.read_into(old, piece.first_row)
        self._open = piece, self._num_done
        piece.slot.write(new, piece.first_row)
        piece.rows.copy_(old, non_blocking=True)
        self._num_done = num_done
        self._open = None

    def _take_back(self, piece: _Piece) -> None:
        new, old = self._halves(piece)
        piece.slot.write(old, piece.first_row)
        piece.rows.copy_(new, non_blocking=True)

    def _halves(self, piece: _Piece) -> tuple[Tensor, Tensor]:
        """The bucket as room for the new rows and for the old ones."""
        assert self._bucket_HN is not None, "no prepare before the exchange"
        rows = piece.rows
        new, old = (
            half[: rows.nbytes].view(rows.dtype).view(rows.shape) for half in self._bucket_HN
        )
        return new, old

    def _wait(self) -> None:
        """Return when the device has copied: the host's memory may go then."""
        assert self._bucket_HN is not None
        self._bucket_HN[:, :1].cpu()


class PackedCopies:
    """The packed copies of the linear layers' weights that serve now, and what is to replace them.

    A weight that is packed in its own memory leaves its old values in what was staged for it.
    """

    def __init__(self, model: CausalLM, staged: Sequence[Any]) -> None:
        self._layers = list(model.linear_layers().values())
        self._served = [layer.packed for layer in self._layers]
        self._staged = staged

    @torch.no_grad()
    def restore(self) -> None:
        """Serve them again, once all weights that are not packed have their old values."""
        for layer, packed, staged in zip(self._layers, self._served, self._staged, strict=True):
            layer.restore(packed, staged)


@dataclass(frozen=True, slots=True, kw_only=True)
class Replaced:
    """What served before a commit, the `num_writes`-th, and after the `num_writes_before`-th."""

    num_writes: int
    num_writes_before: int
    packed: PackedCopies
    version: int
    had_values: bool
    was_finite: bool
    bases: Mapping[str, Tensor]


@dataclass(slots=True, kw_only=True)
class StagedWeights:
    """A verified update, which can be committed once. Only ServedWeights changes it.

    `replacement` puts the weights in place that have no packed form of their own; the others are
    there as `packed`, what the backend packed for each linear layer. It was staged after
    `num_writes` writes. `num_bytes` is the size of the weights that change: all, but
    under an adapter. `bases` has what adapted weights are without it. `follows_served`: it is an
    adapter on the weights that were served. `started_at` is when staging began, on the clock of
    time.perf_counter; `seconds` is how long it took. `share`: this rank's of its fingerprints;
    `checksum` is "" until it is accepted with those of all ranks, as is `is_finite`: whether no
    weight has NaN or infinity. `is_spent`: a commit has begun
    and was not undone. `replaced`: what the commit has replaced. `elsewhere`: what the other
    ranks have staged, which ends with this.
    """

    replacement: Replacement
    packed: Sequence[Any]
    num_writes: int
    num_bytes: int
    bases: Mapping[str, Tensor]
    follows_served: bool
    share: WeightShare
    is_spent: bool = False
    replaced: Replaced | None = None
    elsewhere: Any = None
    checksum: str
    is_finite: bool
    started_at: float
    seconds: float
