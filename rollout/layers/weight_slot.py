"""WeightSlot: access to one weight of a checkpoint, in whatever form a model keeps the weight.

Layers and `rollout.models.weight_names` make the slots. CausalLM and `rollout.models.weights` load
and save weights through slots. `rollout.weights` uses them to stage, commit and fingerprint
weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

from rollout.backends.base import RepackedWeight
from rollout.layers.shard import Cut

Index: TypeAlias = tuple[int | slice, ...]
WHOLE: Index = ()


class WeightSlot(Protocol):
    """Access to the values of one weight. A slot stays valid when parameters move or are repacked.

    `shape` is the shape of the whole weight. `cut` is the part that this rank keeps under tensor
    parallelism; None if this rank keeps the whole weight. `read` and `write` apply to that part.
    `address` is the weight's first byte in memory; 0 while the memory is released. Tied weights
    have equal addresses. `is_repacked` says whether a backend has packed the weight in the weight's
    own memory.
    """

    @property
    def shape(self) -> torch.Size: ...

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def address(self) -> int: ...

    @property
    def is_repacked(self) -> bool: ...

    @property
    def cut(self) -> Cut | None: ...

    def read(self) -> Tensor:
        """Return the values: a copy, or a view that the caller must not write."""
        ...

    def read_into(self, rows: Tensor, first_row: int = 0) -> None:
        """Copy the weight's rows from `first_row` on into `rows`, as many as `rows` has."""
        ...

    def write(self, values: Tensor, first_row: int = 0) -> None:
        """Replace the rows from `first_row` on by `values`, in place. Values are cast."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightAlias:
    """A tensor that an update can have in place of one or several weights. `shape` is the shape of
    the tensor. `parts` has each weight's index into the tensor, by the weight's name. Together the
    weights fill the tensor."""

    shape: torch.Size
    parts: Mapping[str, Index]


def part_of(tensor: Tensor, index: Index) -> Tensor:
    """Return the view of `tensor` at `index`; the tensor itself for an empty index."""
    return tensor[index] if index else tensor


class RowsOwner(Protocol):
    """A layer with a matrix that a backend can repack in the matrix's own memory."""

    @property
    def weight(self) -> Tensor: ...

    @property
    def repacked(self) -> RepackedWeight | None: ...


class RowsSlot:
    """The slot of rows [start, end) of a layer's matrix, which can be repacked at any time."""

    __slots__ = ("_end", "_owner", "_start", "shape")
    cut = None

    def __init__(self, owner: RowsOwner, start: int, end: int) -> None:
        self._owner, self._start, self._end = owner, start, end
        self.shape = self._now().shape

    @property
    def dtype(self) -> torch.dtype:
        return self._owner.weight.dtype  # the same if it is repacked

    @property
    def address(self) -> int:
        if (repacked := self._owner.repacked) is not None:
            return repacked.address(self._start)
        weight = self._owner.weight
        address = weight.data_ptr()
        return address and address + self._start * weight.stride(0) * weight.itemsize

    @property
    def is_repacked(self) -> bool:
        return self._owner.repacked is not None

    def read(self) -> Tensor:
        return self._now().read()

    def read_into(self, rows: Tensor, first_row: int = 0) -> None:
        self._now().read_into(rows, first_row)

    def write(self, values: Tensor, first_row: int = 0) -> None:
        self._now().write(values, first_row)

    def _now(self) -> TensorSlot | RepackedSlot:
        repacked = self._owner.repacked
        if repacked is None:
            return TensorSlot(self._owner.weight, (slice(self._start, self._end),))
        return RepackedSlot(repacked, self._start, self._end)


class TensorSlot:
    """The slot of a weight that is a tensor, or the contiguous part of a tensor at `index`."""

    __slots__ = ("_index", "_offset", "_tensor", "shape")
    is_repacked = False
    cut = None

    def __init__(self, tensor: Tensor, index: Index = WHOLE) -> None:
        self._tensor, self._index = tensor, index
        place = self._place()
        self.shape = place.shape
        self._offset = int(place.storage_offset() - tensor.storage_offset()) * tensor.itemsize

    @property
    def dtype(self) -> torch.dtype:
        return self._tensor.dtype

    @property
    def address(self) -> int:
        address = self._tensor.data_ptr()
        return address and address + self._offset

    def read(self) -> Tensor:
        return self._place()

    def read_into(self, rows: Tensor, first_row: int = 0) -> None:
        rows.copy_(self._place()[first_row : first_row + len(rows)])

    def write(self, values: Tensor, first_row: int = 0) -> None:
        place = self._place()
        if values.shape != place.shape:
            place = place[first_row : first_row + len(values)]
        place.copy_(values)

    def _place(self) -> Tensor:
        return part_of(self._tensor.detach(), self._index)


class ReorderedSlot:
    """The slot of a stack whose rows or columns a checkpoint has in another order.

    Each entry of the stack is a matrix or a vector. If `alternate`, an entry's rows form two
    halves, whose rows alternate in the checkpoint. If `is_transposed`, the checkpoint has the
    transpose of each entry.
    """

    __slots__ = ("_alternate", "_is_transposed", "_stack", "shape")
    is_repacked = False
    cut = None

    def __init__(self, stack: Tensor, *, alternate: bool, is_transposed: bool) -> None:
        self._stack, self._alternate, self._is_transposed = stack, alternate, is_transposed
        self.shape = stack.mT.shape if is_transposed else stack.shape

    @property
    def dtype(self) -> torch.dtype:
        return self._stack.dtype

    @property
    def address(self) -> int:
        return self._stack.data_ptr()

    def read(self) -> Tensor:
        values = torch.empty(self.shape, dtype=self.dtype, device=self._stack.device)
        self.read_into(values)
        return values

    def read_into(self, rows: Tensor, first_row: int = 0) -> None:
        for entry, place in zip(self._stack.detach()[first_row:], rows, strict=False):
            ordered = entry
            if self._alternate:
                ordered = entry.unflatten(0, (2, -1)).transpose(0, 1).flatten(0, 1)
            place.copy_(ordered.T if self._is_transposed else ordered)

    def write(self, values: Tensor, first_row: int = 0) -> None:
        for entry, given in zip(self._stack.detach()[first_row:], values, strict=False):
            # Torch transposes a single matrix without a cast by tiles, three times as fast.
            rows = given.to(entry)
            rows = rows.T.contiguous() if self._is_transposed else rows
            if self._alternate:
                entry.unflatten(0, (2, -1)).copy_(rows.unflatten(0, (-1, 2)).transpose(0, 1))
            else:
                entry.copy_(rows)


class RepackedSlot:
    """The slot of rows [start, end) of a matrix that a backend has repacked."""

    __slots__ = ("_end", "_repacked", "_start")
    is_repacked = True
    cut = None

    def __init__(self, repacked: RepackedWeight, start: int, end: int) -> None:
        self._repacked, self._start, self._end = repacked, start, end

    @property
    def shape(self) -> torch.Size:
        return torch.Size((self._end - self._start, self._repacked.shape[1]))

    @property
    def dtype(self) -> torch.dtype:
        return self._repacked.dtype

    @property
    def address(self) -> int:
        return self._repacked.address(self._start)

    def read(self) -> Tensor:
        return self._repacked.read(self._start, self._end)

    def read_into(self, rows: Tensor, first_row: int = 0) -> None:
        start = self._start + first_row
        rows.copy_(self._repacked.read(start, start + len(rows)))

    def write(self, values: Tensor, first_row: int = 0) -> None:
        self._repacked.write(values, self._start + first_row)


class CutSlot:
    """The slot of a weight that this rank keeps only in part. `kept` is the slot of this part."""

    __slots__ = ("_kept", "cut")

    def __init__(self, kept: WeightSlot, cut: Cut) -> None:
        self._kept, self.cut = kept, cut

    @property
    def shape(self) -> torch.Size:
        return self.cut.shape

    @property
    def dtype(self) -> torch.dtype:
        return self._kept.dtype

    @property
    def address(self) -> int:
        return self._kept.address

    @property
    def is_repacked(self) -> bool:
        return self._kept.is_repacked

    def read(self) -> Tensor:
        return self._kept.read()

    def read_into(self, rows: Tensor, first_row: int = 0) -> None:
        self._kept.read_into(rows, first_row)

    def write(self, values: Tensor, first_row: int = 0) -> None:
        self._kept.write(values, first_row)


class AbsentSlot:
    """The slot of a weight, such as an expert's, that only another rank has. `read` returns 0 rows.
    `address` is a unique negative number."""

    __slots__ = ("cut", "dtype", "shape")
    is_repacked = False

    def __init__(self, shape: torch.Size, dtype: torch.dtype) -> None:
        self.shape, self.dtype = shape, dtype
        self.cut = Cut(shape=shape, dim=0, ranges=())

    @property
    def address(self) -> int:
        return -1 - id(self)

    def read(self) -> Tensor:
        return torch.empty((0, *self.shape[1:]), dtype=self.dtype)

    def read_into(self, rows: Tensor, first_row: int = 0) -> None:
        assert not len(rows), "rows of another rank's weight"

    def write(self, values: Tensor, first_row: int = 0) -> None:
        assert not len(values), "a value for another rank's weight"


def slot_of(kept: WeightSlot, cut: Cut | None) -> WeightSlot:
    """Return the slot of a weight, given the slot of this rank's part. `cut` is the part; None if
    it is the whole weight."""
    return kept if cut is None else CutSlot(kept, cut)


def kept_of(slot: WeightSlot, whole: Tensor) -> Tensor:
    """Return the part of a whole weight's values that `slot` keeps. The part is a copy if it has
    several ranges, else a view."""
    return whole if slot.cut is None else slot.cut.of(whole)


def write_rows(slot: WeightSlot, rows: Tensor, first_row: int) -> None:
    """Write the kept part of `rows`, whose first row is row `first_row` of the slot's whole
    weight."""
    if slot.cut is None:
        slot.write(rows, first_row)
        return
    for kept_row, values in slot.cut.rows_of(rows, first_row):
        slot.write(values, kept_row)
