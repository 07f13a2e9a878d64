"""WeightSlot: one weight of a checkpoint, wherever and in whatever form a model keeps it."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from rollout.backends.base import RepackedWeight


class WeightSlot(Protocol):
    """A place to read one weight from and to write it to, whatever lies behind.

    `address` is where the weight begins in memory: slots with equal addresses are tied.
    """

    @property
    def shape(self) -> torch.Size: ...

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def address(self) -> int: ...

    def read(self) -> Tensor:
        """Return the values: the weight's memory itself, which is not to be written, or a copy."""
        ...

    def write(self, values: Tensor, first_row: int = 0) -> None:
        """Replace the rows from `first_row` on, which is in place; `values` are cast."""
        ...


def rows_slot(
    weight: Tensor, repacked: RepackedWeight | None, start: int, end: int
) -> TensorSlot | RepackedSlot:
    """Return the slot of rows [start, end) of a matrix, which may be `repacked`."""
    if repacked is None:
        return TensorSlot(weight[start:end])
    return RepackedSlot(repacked, start, end)


class TensorSlot:
    """The slot of a weight that is a tensor, or a part of one."""

    __slots__ = ("_tensor",)

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor.detach()

    @property
    def shape(self) -> torch.Size:
        return self._tensor.shape

    @property
    def dtype(self) -> torch.dtype:
        return self._tensor.dtype

    @property
    def address(self) -> int:
        return self._tensor.data_ptr()

    def read(self) -> Tensor:
        return self._tensor

    def write(self, values: Tensor, first_row: int = 0) -> None:
        place = self._tensor
        if values.shape != place.shape:
            place = place[first_row : first_row + len(values)]
        place.copy_(values)


class RepackedSlot:
    """The slot of rows [start, end) of a matrix that a backend has packed in its own memory."""

    __slots__ = ("_end", "_repacked", "_start")

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

    def write(self, values: Tensor, first_row: int = 0) -> None:
        self._repacked.write(values, self._start + first_row)
