"""GatedMLP: the gated feed-forward network down(activation(gate(x)) * up(x)).

Used by `rollout.models.decoder`, by `rollout.layers.experts` as the shared expert, and by
`rollout.models.layout`, which makes its spec. A forward pass changes nothing. Source: Shazeer 2020,
"GLU Variants Improve Transformer". Shape letters: T tokens, E hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rollout.layers.base import BackendLayer
from rollout.layers.linear import Linear
from rollout.layers.shard import ALONE, Shard


@dataclass(frozen=True, slots=True, kw_only=True)
class MlpSpec:
    """Sizes and variants of a GatedMLP. `is_fused` says whether checkpoints keep gate and up as one
    `gate_up_proj`."""

    intermediate_size: int
    bias: bool
    activation: str  # "silu" or "gelu_tanh"
    is_fused: bool


class GatedMLP(BackendLayer):
    """The gated feed-forward network, with gate and up fused into one projection. Under tensor
    parallelism each rank has some of the intermediate columns, and the caller must sum the outputs
    over the ranks."""

    def __init__(
        self,
        hidden_size: int,
        spec: MlpSpec,
        *,
        dtype: torch.dtype,
        device: torch.device,
        shard: Shard = ALONE,
    ) -> None:
        super().__init__()
        self.spec = spec
        size, kept = spec.intermediate_size, shard.range_of(spec.intermediate_size)
        kind: dict[str, Any] = {"bias": spec.bias, "dtype": dtype, "device": device}
        gate_up, rows = (
            {"gate_proj": size, "up_proj": size},
            {"gate_proj": [kept], "up_proj": [kept]},
        )
        if spec.is_fused:
            gate_up = {"gate_up_proj": 2 * size}
            rows = {"gate_up_proj": [kept, kept.of_width(1, after=size)]}
        self.gate_up = Linear(hidden_size, gate_up, rows=rows, **kind)
        self.down = Linear(
            size, {"down_proj": hidden_size}, columns=kept, adds_bias=shard.rank == 0, **kind
        )

    def forward(self, x_TE: Tensor) -> Tensor:
        gate_up = self.gate_up(x_TE)
        is_silu = self.spec.activation == "silu"
        active = self.ops.silu_mul(gate_up) if is_silu else self.ops.gelu_mul(gate_up)
        output_TE: Tensor = self.down(active)
        return output_TE
