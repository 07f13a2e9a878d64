"""Linear: one or several projections of the same input, fused into one matrix.

Shape letters: T tokens, K in features, N out features of all parts together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from rollout.backends.base import Backend, RepackedWeight
from rollout.layers.base import BackendLayer, empty_parameter
from rollout.layers.weight_slot import RowsSlot, TensorSlot, WeightSlot


class Linear(BackendLayer):
    """y_TN = x_TK @ weight.T + bias_N, where the rows of `weight`, [N, K], belong to named parts.

    A backend may pack `weight` in its own memory: then it has another shape, and `repacked` reads
    and writes its rows.

    Fusing spares operators: query, key and value become one matrix product. The parts keep the
    names they have in a checkpoint, and `weight_slots` has a slot for each.
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
    ) -> None:
        """`parts`: names to out features, in row order. `tied_weight` replaces an own weight."""
        super().__init__()
        self.parts = dict(parts)
        num_rows = sum(parts.values())
        if tied_weight is None:
            tied_weight = empty_parameter(num_rows, in_features, dtype=dtype, device=device)
        self.weight = tied_weight
        self.bias = empty_parameter(num_rows, dtype=dtype, device=device) if bias else None
        self.handle: Any = None

    def bind(self, backend: Backend) -> None:
        if self.repacked is not None:
            self.repacked.unpack()
        super().bind(backend)
        self.handle = backend.ops.prepare_linear(self.weight, self.bias, may_repack=True)

    def stage(self, weights: Sequence[Tensor]) -> Any:
        """Prepare for new weights, one tensor per part in order; nothing changes yet."""
        return self.ops.stage(self.handle, weights)

    def refresh(self, staged: Any = None) -> None:
        """Let the backend's handle follow an in-place change of the weight."""
        self.ops.refresh(self.handle, staged)

    def release_packed(self) -> None:
        """Drop what the backend packed; `refresh` makes it anew."""
        self.ops.release(self.handle)

    @property
    def packed(self) -> Any:
        """What the backend packed, if it holds the weight's very bytes; None otherwise."""
        return self.ops.packed(self.handle)

    @property
    def repacked(self) -> RepackedWeight | None:
        """The weight, if the backend has packed it in its own memory."""
        return None if self.handle is None else self.ops.repacked(self.handle)

    def restore(self, packed: Any, staged: Any) -> None:
        """Go back to the weight from before `refresh(staged)`, of which `packed` was made.

        It has its values already if it is not packed.
        """
        if self.repacked is not None:
            self.repacked.undo(staged)
        elif packed is not None:
            self.weight.detach().copy_(self.ops.unpack(packed))
        self.refresh(packed)

    def forward(self, x_TK: Tensor) -> Tensor:
        return self.ops.linear(x_TK, self.handle)

    def weight_slots(self) -> dict[str, WeightSlot]:
        """Each part's weight (and bias) by name: rows of the fused parameter."""
        slots: dict[str, WeightSlot] = {}
        start = 0
        for part, num_rows in self.parts.items():
            end = start + num_rows
            slots[f"{part}.weight"] = RowsSlot(self, start, end)
            if self.bias is not None:
                slots[f"{part}.bias"] = TensorSlot(self.bias, (slice(start, end),))
            start = end
        return slots
