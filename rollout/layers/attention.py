"""Attention: grouped-query self-attention with rotary positions, over the backend's KV cache.

Shape letters: T tokens, L kept tokens, E hidden size, H query heads, G key/value heads, D head dim.
Source of grouped queries: Ainslie et al. 2023, "GQA".
"""

from __future__ import annotations

import torch
from torch import Tensor

from rollout.backends.base import AttentionBackend, Backend
from rollout.backends.forward_batch import ForwardBatch, Rotation
from rollout.layers.base import BackendLayer
from rollout.layers.linear import Linear
from rollout.layers.norm import RMSNorm


class Attention(BackendLayer):
    """One layer's attention block, from the normed hidden states to the output projection.

    Query, key and value are strided views of one fused projection and are never copied here.
    """

    attention: AttentionBackend

    def __init__(
        self,
        layer_index: int,
        *,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        bias: bool,
        output_bias: bool,
        qk_norm_eps: float | None,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """`qk_norm_eps` None means that query and key heads are not normed (Qwen3 norms them)."""
        super().__init__()
        self.layer_index = layer_index
        self.head_dim = head_dim
        self.head_split = [num_heads, num_kv_heads, num_kv_heads]
        self.num_fused_heads = sum(self.head_split)
        sizes = [heads * head_dim for heads in self.head_split]
        qkv = dict(zip(("q_proj", "k_proj", "v_proj"), sizes, strict=True))
        output = {"o_proj": hidden_size}
        self.qkv = Linear(hidden_size, qkv, bias=bias, dtype=dtype, device=device)
        self.output = Linear(sizes[0], output, bias=output_bias, dtype=dtype, device=device)
        self.q_norm: RMSNorm | None = None
        self.k_norm: RMSNorm | None = None
        if qk_norm_eps is not None:
            self.q_norm = RMSNorm(head_dim, qk_norm_eps, dtype=dtype, device=device)
            self.k_norm = RMSNorm(head_dim, qk_norm_eps, dtype=dtype, device=device)

    def bind(self, backend: Backend) -> None:
        super().bind(backend)
        self.attention = backend.attention

    def forward(
        self,
        x_TE: Tensor,
        cos_TD: Tensor,
        sin_TD: Tensor,
        batch: ForwardBatch,
        kept_L: Tensor | None = None,
    ) -> Tensor:
        """[T, E], or [L, E] of the kept tokens alone. All tokens' K and V enter the cache."""
        fused_heads = self.qkv(x_TE).view(-1, self.num_fused_heads, self.head_dim)
        q_THD, k_TGD, v_TGD = fused_heads.split(self.head_split, dim=1)
        rotation = self._rotation(cos_TD, sin_TD)
        context_THD = self.attention.attend(q_THD, k_TGD, v_TGD, self.layer_index, batch, rotation)
        if kept_L is not None:
            context_THD = context_THD.index_select(0, kept_L)
        output_TE: Tensor = self.output(context_THD.flatten(1))
        return output_TE

    def _rotation(self, cos_TD: Tensor, sin_TD: Tensor) -> Rotation:
        if self.q_norm is None or self.k_norm is None:
            return Rotation(cos_TD, sin_TD)
        return Rotation(cos_TD, sin_TD, self.q_norm.weight, self.k_norm.weight, self.q_norm.eps)
