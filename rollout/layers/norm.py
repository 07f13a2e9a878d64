"""RMSNorm and LayerNorm, alone or fused with the addition to the residual stream.

Used by `rollout.layers.attention`, `rollout.layers.latent_attention` and `rollout.models.decoder`.
A forward pass changes nothing.

Sources: Zhang and Sennrich 2019, "Root Mean Square Layer Normalization"; Ba et al. 2016, "Layer
Normalization".
"""

from __future__ import annotations

import torch
from torch import Tensor

from rollout.backends.base import Backend
from rollout.layers.base import BackendLayer, empty_parameter
from rollout.layers.shard import Range, cut_to
from rollout.parallel.collectives import Collectives


class RMSNorm(BackendLayer):
    """x / sqrt(mean(x²) + eps) * weight over the last dimension, computed in float32.

    `offset` is added to the weight in float32, because Gemma stores weights minus 1. `rounds_first`
    says whether the family's trainers round to x's dtype before the product with the weight. If so,
    this layer rounds there, too, if its backend has `rounds_like_trainers`. `kept` is the range of
    dims that this rank has if rows are split over the ranks (see `norm_cut_rows`); None means all
    dims.
    """

    def __init__(
        self,
        dim: int,
        eps: float,
        *,
        offset: float = 0.0,
        rounds_first: bool = False,
        dtype: torch.dtype,
        device: torch.device,
        kept: Range | None = None,
    ) -> None:
        super().__init__()
        self.dim, self.eps, self.offset = dim, eps, offset
        self._trainers_round_first, self.rounds_first = rounds_first, False
        cut = None if kept is None else cut_to([kept], (dim,))
        self.is_counted = kept is None or kept.is_counted
        self.weight = self.parameter_of("weight", (dim,), cut, dtype=dtype, device=device)

    def bind(self, backend: Backend) -> None:
        super().bind(backend)
        self.rounds_first = self._trainers_round_first and backend.ops.rounds_like_trainers

    @property
    def scale(self) -> Tensor:
        """The weight plus its offset."""
        return self.weight.float() + self.offset if self.offset else self.weight

    def forward(self, x: Tensor) -> Tensor:
        """Return `x` normed. `x` can be a strided view of a fused projection."""
        return self.ops.rms_norm(x, self.scale, self.eps, rounds_first=self.rounds_first)

    def add(self, x_TE: Tensor, residual_TE: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return (norm(x + residual), x + residual). `residual_TE` None means zeros."""
        if residual_TE is None:
            return self(x_TE), x_TE
        rounds_first = self.rounds_first
        return self.ops.add_rms_norm(
            x_TE, residual_TE, self.scale, self.eps, rounds_first=rounds_first
        )


def norm_cut_rows(collectives: Collectives, *rows: tuple[RMSNorm, Tensor]) -> list[Tensor]:
    """Return this rank's parts of normed rows that are split over the ranks. Each of `rows` is an
    RMSNorm and this rank's part of the rows, [T, H, D]. One all-reduce sums the squares of all
    ranks. A part that several ranks have counts once."""
    sums_TN = torch.stack(
        [x_THD.float().square().sum((1, 2)) * norm.is_counted for norm, x_THD in rows], dim=1
    )
    sums_NT1 = collectives.all_reduce_(sums_TN).t().unsqueeze(-1)
    normed = []
    for (norm, x_THD), sum_T1 in zip(rows, sums_NT1, strict=True):
        x_TX = x_THD.flatten(1)
        scale_T1 = torch.rsqrt(sum_T1 / norm.dim + norm.eps)
        normed_TX = x_TX.float() * scale_T1
        if norm.rounds_first:
            normed_TX = normed_TX.to(x_TX.dtype).float()
        normed_TX = (normed_TX * norm.scale.float()).to(x_TX.dtype)
        normed.append(normed_TX.view(x_THD.shape))
    return normed


class LayerNorm(BackendLayer):
    """(x - mean(x)) / sqrt(variance(x) + eps) * weight over the last dimension, computed in
    float32."""

    def __init__(self, dim: int, eps: float, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.eps = eps
        self.weight = empty_parameter(dim, dtype=dtype, device=device)

    def forward(self, x: Tensor) -> Tensor:
        return self.ops.layer_norm(x, self.weight, self.eps)

    def add(self, x_TE: Tensor, residual_TE: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return (norm(x + residual), x + residual). `residual_TE` None means zeros."""
        total_TE = x_TE if residual_TE is None else x_TE + residual_TE
        return self(total_TE), total_TE
