"""GatedMLP: down(activation(gate(x)) * up(x)). Source: Shazeer 2020, "GLU Variants Improve
Transformer".

Shape letters: T tokens, E hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rollout.layers.base import BackendLayer
from rollout.layers.linear import Linear


@dataclass(frozen=True, slots=True, kw_only=True)
class MlpSpec:
    """What shapes a GatedMLP. `is_fused`: checkpoints keep gate and up as one `gate_up_proj`."""

    intermediate_size: int
    bias: bool
    activation: str  # "silu" or "gelu_tanh"
    is_fused: bool


class GatedMLP(BackendLayer):
    """The gated feed-forward network, with gate and up fused into one projection."""

    def __init__(
        self, hidden_size: int, spec: MlpSpec, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        self.spec = spec
        size, bias = spec.intermediate_size, spec.bias
        gate_up = (
            {"gate_up_proj": 2 * size} if spec.is_fused else dict(gate_proj=size, up_proj=size)
        )
        down = {"down_proj": hidden_size}
        self.gate_up = Linear(hidden_size, gate_up, bias=bias, dtype=dtype, device=device)
        self.down = Linear(size, down, bias=bias, dtype=dtype, device=device)

    def forward(self, x_TE: Tensor) -> Tensor:
        gate_up = self.gate_up(x_TE)
        is_silu = self.spec.activation == "silu"
        active = self.ops.silu_mul(gate_up) if is_silu else self.ops.gelu_mul(gate_up)
        output_TE: Tensor = self.down(active)
        return output_TE
