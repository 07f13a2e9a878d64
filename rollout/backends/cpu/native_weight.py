"""NativeWeight: a weight in the compiled kernels' layout, which only reorders the numbers.

Created by NativeProduct in `rollout.backends.cpu.products`. Weight slots read and write it, and
weight updates swap its values, through `RepackedWeight` of `rollout.backends.base`.

Shape letters: N out features, K in features, P panels, W out features of a panel, R rows, T tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from ctypes import addressof, c_int64

import torch
from torch import Tensor

from rollout.backends.cpu.kernels import Kernels
from rollout.backends.cpu.mapping import map_bytes

_MIN_WEIGHTS_PER_THREAD = 1 << 17
_REORDERED_AT_ONCE = 1 << 18  # numbers that are copied at once to reorder in place


class NativeWeight:
    """A weight in P panels, each with all K inputs of W outputs. W is the number of floats in two
    vectors. `panels_PKW` is a packed copy, or the weight's own memory in packed order. If it is the
    weight's own memory, this object is the weight's `RepackedWeight`."""

    __slots__ = (
        *("_kernels", "_num_exchanges", "min_panels_per_thread", "num_outputs", "panels_PKW"),
        "sizes_PKW",
    )

    def __init__(self, kernels: Kernels, panels_PKW: Tensor, num_outputs: int) -> None:
        self._kernels = kernels
        self._num_exchanges = c_int64(0)
        self.panels_PKW, self.num_outputs = panels_PKW, num_outputs
        self.sizes_PKW = tuple(panels_PKW.shape)  # valid also while the memory is released
        _, num_inputs, width = self.sizes_PKW
        self.min_panels_per_thread = _MIN_WEIGHTS_PER_THREAD // (num_inputs * width) + 1

    @classmethod
    def copy_of(
        cls,
        kernels: Kernels,
        parts: Sequence[Tensor],
        lanes: int,
        allocate: Callable[[int], Tensor],
    ) -> NativeWeight:
        """Return a copy of a float32 or bfloat16 weight, whose rows are `parts`, in panels of 2 *
        `lanes` outputs. `allocate` returns the given number of bytes, all zero."""
        num_outputs, num_inputs = sum(map(len, parts)), parts[0].shape[1]
        shape = -(-num_outputs // (2 * lanes)), num_inputs, 2 * lanes
        memory = allocate(math.prod(shape) * parts[0].itemsize)
        packed = cls(kernels, memory.view(parts[0].dtype).view(shape), num_outputs)
        start = 0
        for part in parts:
            packed.write(part, start)
            start += len(part)
        return packed

    @classmethod
    def in_place_of(cls, kernels: Kernels, weight_NK: Tensor, lanes: int) -> NativeWeight:
        """Reorder a weight in its own memory, and give its tensor the shape of panels. The rows
        must fill whole panels."""
        num_outputs, num_inputs = weight_NK.shape
        rows_NK = weight_NK.detach()
        weight_NK.data = rows_NK.view(-1, num_inputs, 2 * lanes)
        packed = cls(kernels, weight_NK, num_outputs)
        # A panel occupies exactly the bytes of its rows, so that parts of a weight do not overlap.
        for start in range(0, num_outputs, packed._rows_at_once()):
            packed.write(rows_NK[start : start + packed._rows_at_once()].clone(), start)
        return packed

    @property
    def shape(self) -> torch.Size:
        return torch.Size((self.num_outputs, self.sizes_PKW[1]))

    @property
    def dtype(self) -> torch.dtype:
        return self.panels_PKW.dtype

    def address(self, row: int) -> int:
        """Return the address of the row's first number; 0 while the memory is released."""
        _, num_inputs, width = self.sizes_PKW
        position = row // width * width * num_inputs + row % width
        address = self.panels_PKW.data_ptr()
        return address and address + position * self.dtype.itemsize

    def read(self, start: int, end: int) -> Tensor:
        """Return a copy of rows [start, end), [R, K]."""
        first, last = self._panels(start, end)
        num_rows = min(last, self.num_outputs) - first
        rows_RK = torch.empty(num_rows, self.sizes_PKW[1], dtype=self.dtype)
        self._reorder(self._kernels.unpack_weights, rows_RK, first)
        return rows_RK[start - first : end - first]

    def write(self, values_RK: Tensor, start: int = 0) -> None:
        """Replace the rows from `start` on by `values_RK`, cast to the weight's dtype."""
        end = start + len(values_RK)
        first, last = self._panels(start, end)
        if start == first and (end == last or end == self.num_outputs):
            rows_RK = values_RK.detach().to(self.panels_PKW).contiguous()
        else:
            rows_RK = self.read(first, min(last, self.num_outputs))
            rows_RK[start - first : end - first].copy_(values_RK)
        self._reorder(self._kernels.pack_weights, rows_RK, first)

    def gather(self, rows_T: Tensor) -> Tensor:
        """Return a copy of the rows with indices `rows_T`, [T, K]."""
        width = self.sizes_PKW[2]
        return self.panels_PKW[rows_T // width, :, rows_T % width]

    def to_dense(self) -> Tensor:
        """Return the weight, [N, K]."""
        return self.read(0, self.num_outputs)

    def exchange(self, staged: NativeWeight) -> None:
        """Swap values with `staged`. An interrupt can arrive only before or after the swap."""
        assert self.sizes_PKW == staged.sizes_PKW
        self._kernels.exchange(
            *(self.panels_PKW.data_ptr(), staged.panels_PKW.data_ptr(), self.panels_PKW.nbytes),
            *(torch.get_num_threads(), addressof(staged._num_exchanges)),
        )

    def undo(self, staged: NativeWeight) -> None:
        """Undo `exchange(staged)`. No-op if that exchange did not run."""
        if staged._num_exchanges.value % 2:
            self.exchange(staged)

    def unpack(self) -> None:
        """Undo `in_place_of`: restore the plain order of rows and the tensor's shape [N, K]."""
        rows_NK = self.panels_PKW.detach().view(self.shape)
        for start in range(0, self.num_outputs, self._rows_at_once()):
            end = min(start + self._rows_at_once(), self.num_outputs)
            rows_NK[start:end].copy_(self.read(start, end))
        self.panels_PKW.data = rows_NK

    def _rows_at_once(self) -> int:
        _, num_inputs, width = self.sizes_PKW
        return max(1, _REORDERED_AT_ONCE // (num_inputs * width)) * width

    def _panels(self, start: int, end: int) -> tuple[int, int]:
        """Return the range of all rows in the panels that hold rows [start, end)."""
        width = self.sizes_PKW[2]
        return start // width * width, -(-end // width) * width

    def _reorder(self, function: Callable[..., None], rows_RK: Tensor, first_row: int) -> None:
        """Call `function`, which packs or unpacks, on `rows_RK` and the panels from row `first_row`
        on."""
        _, num_inputs, width = self.sizes_PKW
        addresses = self.address(first_row), rows_RK.data_ptr()
        shape = len(rows_RK), num_inputs, width, rows_RK.itemsize

        def work(first: int, last: int) -> None:
            function(*addresses, *shape, first, last)

        self._kernels.split(-(-len(rows_RK) // width), work, self.min_panels_per_thread)


def packed_bytes(num_bytes: int) -> Tensor:
    """Return zeroed memory for a packed copy. The memory is mapped, so that it gets huge pages if
    the system has some."""
    return map_bytes("packed weight", num_bytes).tensor  # products are up to a tenth faster
