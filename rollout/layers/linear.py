"""Linear: one or several projections of the same input, fused into one matrix.

Used by the attention, MLP and expert layers of `rollout.layers`, by the language-model head of
`rollout.models.causal_lm`, by `rollout.models.weight_names`, and by benchmarks. Weight updates call
`stage`, `refresh` and `restore`, which change packed copies. A forward pass changes nothing.

Shape letters: T tokens, K in features, N out features of all parts together.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from rollout.backends.base import Backend, RepackedWeight
from rollout.layers.base import BackendLayer, empty_parameter
from rollout.layers.shard import Range, cut_to
from rollout.layers.weight_slot import RowsSlot, TensorSlot, WeightSlot

NO_CUTS: Mapping[str, Sequence[Range]] = MappingProxyType({})


class Linear(BackendLayer):
    """y_TN = x_TK @ weight.T + bias_N, where the rows of `weight`, [N, K], belong to named parts.

    Parts are for example "q_proj", "k_proj" and "v_proj". The parts keep their names in
    checkpoints, and `weight_slots` has a slot for each part. `parts` maps each name to the number
    of its rows on this rank. A backend can repack `weight` in the weight's own memory. The tensor
    then has another shape, and `repacked` reads and writes its rows.
    """

    def __init__(
        self,
        in_features: int,
        parts: Mapping[str, int],
        *,
        bias: bool,
        dtype: torch.dtype,
        device: torch.device,
        tied_weight: nn.Parameter | None = None,
        rows: Mapping[str, Sequence[Range]] = NO_CUTS,
        columns: Range | None = None,
        adds_bias: bool = True,
    ) -> None:
        """`parts` has the out features by name, in row order. `tied_weight` is another layer's
        parameter to share; None means a parameter of this layer. `rows` has the rows of a part that
        this rank keeps; a part without an entry is kept whole. `columns` is the range of columns
        that this rank keeps; None means all. If `columns` is given, the caller must sum the
        products over the ranks, and only one rank can have `adds_bias`."""
        super().__init__()
        self.parts, self.adds_bias = dict(parts), adds_bias
        for part, size in parts.items():
            cut = cut_to(rows.get(part, [Range(0, size)]), (size, in_features))
            if columns is not None:
                cut = cut_to([columns], (size, in_features), dim=1)
            if cut is not None:
                self.parts[part] = cut.kept_shape[0]
                self.cuts[f"{part}.weight"] = cut
            if bias and cut is not None and (of_bias := cut.of_bias()) is not None:
                self.cuts[f"{part}.bias"] = of_bias
        num_rows, num_columns = sum(self.parts.values()), columns.length if columns else in_features
        if tied_weight is None:
            tied_weight = empty_parameter(num_rows, num_columns, dtype=dtype, device=device)
        self.weight = tied_weight
        self.bias = empty_parameter(num_rows, dtype=dtype, device=device) if bias else None
        self.handle: Any = None
        self._slots: dict[str, WeightSlot] = {}  # made once: slots stay valid when memory moves

    def bind(self, backend: Backend) -> None:
        if self.repacked is not None:
            self.repacked.unpack()
        super().bind(backend)
        bias = self.bias if self.adds_bias else None
        self.handle = backend.ops.prepare_linear(self.weight, bias, may_repack=True)

    def stage(self, weights: Sequence[Tensor], allocate: Callable[[int], Tensor]) -> Any:
        """Pack new weights, one tensor per part in order. Return the packed weights for `refresh`.
        The layer does not change. `allocate` is as in `Ops.stage`."""
        return self.ops.stage(self.handle, weights, allocate)

    def refresh(self, staged: Any = None) -> None:
        """Update the backend's packed copy after the weight was changed in place. `staged` is the
        result of `stage` for the new values. If it is None, they are packed now."""
        self.ops.refresh(self.handle, staged)

    def release_packed(self) -> None:
        """Drop the backend's packed copy. `refresh` packs again."""
        self.ops.release(self.handle)

    @property
    def packed(self) -> Any:
        """The backend's packed copy; None if the weight cannot be restored from a copy."""
        return self.ops.packed(self.handle)

    @property
    def repacked(self) -> RepackedWeight | None:
        """Access to the weight's rows if the backend has repacked the weight in place; else
        None."""
        return None if self.handle is None else self.ops.repacked(self.handle)

    def restore(self, packed: Any, staged: Any) -> None:
        """Undo `refresh(staged)`. `packed` is the value of the property `packed` before the
        refresh. If `packed` is None and the weight is not repacked, first restore the weight's
        values."""
        if self.repacked is not None:
            self.repacked.undo(staged)
        elif packed is not None:
            self.weight.detach().copy_(self.ops.unpack(packed))
        self.refresh(packed)

    def forward(self, x_TK: Tensor) -> Tensor:
        return self.ops.linear(x_TK, self.handle)

    def float32(self, x_TK: Tensor) -> Tensor:
        """Return the product in float32, without rounding to x's dtype if the device can avoid
        it."""
        return self.ops.linear_float32(x_TK, self.handle)

    def weight_slots(self) -> dict[str, WeightSlot]:
        """Return a slot for this rank's rows of each part's weight and bias, by name."""
        if self._slots:
            return self._slots
        slots = self._slots
        start = 0
        for part, num_rows in self.parts.items():
            end = start + num_rows
            slots[f"{part}.weight"] = RowsSlot(self, start, end)
            if self.bias is not None:
                slots[f"{part}.bias"] = TensorSlot(self.bias, (slice(start, end),))
            start = end
        return slots
