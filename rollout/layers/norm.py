"""RMSNorm, alone or fused with the addition to the residual stream.

Source: Zhang and Sennrich 2019, "Root Mean Square Layer Normalization".
"""

from __future__ import annotations

import torch
from torch import Tensor

from rollout.layers.base import BackendLayer, empty_parameter


class RMSNorm(BackendLayer):
    """x / sqrt(mean(x²) + eps) * weight over the last dimension, computed in float32."""

    def __init__(self, dim: int, eps: float, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.eps = eps
        self.weight = empty_parameter(dim, dtype=dtype, device=device)

    def forward(self, x: Tensor) -> Tensor:
        """`x` may be a strided view, such as the query heads within a fused projection."""
        return self.ops.rms_norm(x, self.weight, self.eps)

    def add(self, x_TE: Tensor, residual_TE: Tensor | None) -> tuple[Tensor, Tensor]:
        """(norm(x + residual), x + residual): a link of the pre-norm chain, which None starts."""
        if residual_TE is None:
            return self.ops.rms_norm(x_TE, self.weight, self.eps), x_TE
        return self.ops.add_rms_norm(x_TE, residual_TE, self.weight, self.eps)
