"""GatedMLP: down(silu(gate(x)) * up(x)). Source: Shazeer 2020, "GLU Variants Improve Transformer".

Shape letters: T tokens, E hidden size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rollout.layers.base import BackendLayer
from rollout.layers.linear import Linear


class GatedMLP(BackendLayer):
    """The SwiGLU feed-forward network, with gate and up fused into one projection."""

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        *,
        bias: bool,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        gate_up = {"gate_proj": intermediate_size, "up_proj": intermediate_size}
        down = {"down_proj": hidden_size}
        self.gate_up = Linear(hidden_size, gate_up, bias=bias, dtype=dtype, device=device)
        self.down = Linear(intermediate_size, down, bias=bias, dtype=dtype, device=device)

    def forward(self, x_TE: Tensor) -> Tensor:
        output_TE: Tensor = self.down(self.ops.silu_mul(self.gate_up(x_TE)))
        return output_TE
