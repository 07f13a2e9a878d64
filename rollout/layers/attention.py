"""Attention: grouped-query self-attention over the KV cache. AttentionLayer: its base class.

Used by `rollout.models.decoder`, which runs the layers, by `rollout.models.layout`, which makes the
specs, and by `rollout.layers.latent_attention`, which extends AttentionLayer. A forward pass writes
only the KV cache, through the attention backend. Shape letters: T tokens, L tokens whose output is
needed, E hidden size, H query heads, G key/value heads, D head dim. Source of grouped queries:
Ainslie et al. 2023, "GQA".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from rollout.backends.base import AttentionBackend, Backend
from rollout.backends.forward_batch import (
    AttentionTraits,
    ForwardBatch,
    RotaryRounding,
    Rotation,
)
from rollout.layers.base import BackendLayer
from rollout.layers.linear import Linear
from rollout.layers.norm import RMSNorm, norm_cut_rows
from rollout.layers.rope import RopeSpec, head_order
from rollout.layers.shard import ALONE, Range, Shard, cut_to

Angles: TypeAlias = Sequence[tuple[Tensor, Tensor]]  # (cos_TD, sin_TD) of each rope of a model


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionLayerSpec:
    """Sizes and variants that grouped-query and latent attention share.

    `bias` says whether the input projections have a bias, and `output_bias` whether the output
    projection has one. `norm_rounds_first` is `rounds_first` of RMSNorm. `rotary_rounding` says how
    training code of the family rounds rotated heads. `rope_index` is the index of `rope` among the
    model's ropes; None without a rope. `scale` multiplies the scores; None means 1 /
    sqrt(head_dim).
    """

    num_heads: int
    bias: bool
    output_bias: bool
    norm_rounds_first: bool
    rotary_rounding: RotaryRounding
    rope: RopeSpec | None
    rope_index: int | None
    scale: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSpec(AttentionLayerSpec):
    """Sizes and variants of one layer's grouped-query attention.

    `is_fused` says whether checkpoints keep query, key and value as one `qkv_proj`.
    `has_head_norms` says whether each query and key head is normed (Qwen3). `has_projection_norms`
    says whether one norm spans all query heads and one spans all key heads (OLMo 2). `eps` and
    `norm_offset` are arguments of these norms. `window` is the number of positions that a token
    attends to; None means all. `softcap` bounds the scores; None means no bound. `has_sinks` says
    whether each query head has a learned score without a value (GPT-OSS).
    """

    num_kv_heads: int
    head_dim: int
    is_fused: bool
    has_head_norms: bool
    has_projection_norms: bool
    eps: float
    norm_offset: float
    window: int | None
    softcap: float | None
    has_sinks: bool


class AttentionLayer(BackendLayer):
    """One layer's attention block, from the projections of its input to the output projection. A
    subclass projects the hidden states to query, key and value heads. Under tensor parallelism each
    rank has some query heads, and the caller must sum the outputs over the ranks."""

    attention: AttentionBackend
    output: Linear
    traits: AttentionTraits
    order_D: Tensor | None
    rounding: RotaryRounding

    def __init__(
        self, layer_index: int, spec: AttentionLayerSpec, rope_dim: int, device: torch.device
    ) -> None:
        """`rope_dim` is the number of dims per head that the rope can rotate."""
        super().__init__()
        self.layer_index, self._trainers_rounding = layer_index, spec.rotary_rounding
        order_D = head_order(spec.rope, rope_dim, device)
        self.register_buffer("order_D", order_D, persistent=False)

    def bind(self, backend: Backend) -> None:
        super().bind(backend)
        self.attention = backend.attention
        rounds_like_trainers = backend.ops.rounds_like_trainers
        self.rounding = self._trainers_rounding if rounds_like_trainers else "once"

    def forward(
        self, x_TE: Tensor, angles: Angles, batch: ForwardBatch, kept_L: Tensor | None = None
    ) -> Tensor:
        """Return the block's output, [T, E], or [L, E] for the token indices `kept_L`. Writes the
        keys and values of all T tokens to the KV cache."""
        q_THD, k_TGD, v_TGD, rotation = self._heads(x_TE, angles, batch)
        context_THD = self.attention.attend(
            q_THD, k_TGD, v_TGD, self.layer_index, batch, rotation, self.traits
        )
        if kept_L is not None:
            context_THD = context_THD.index_select(0, kept_L)
        output_TE: Tensor = self.output(self._values(context_THD).flatten(1))
        return output_TE

    def _heads(
        self, x_TE: Tensor, angles: Angles, batch: ForwardBatch
    ) -> tuple[Tensor, Tensor, Tensor, Rotation | None]:
        """Return query heads, key heads, value heads and a Rotation. The backend applies the
        Rotation to queries and keys. The Rotation is None without a rope, or if the heads are
        rotated already."""
        raise NotImplementedError

    def _values(self, context_THD: Tensor) -> Tensor:
        """Return the input of the output projection, given the weighted sums of cached values."""
        return context_THD

    def _ordered(self, *heads: Tensor) -> Sequence[Tensor]:
        """Return the heads with their dims in the order of `head_order`, as the rope needs them."""
        if self.order_D is None:
            return heads
        return [x.index_select(-1, self.order_D) for x in heads]


class Attention(AttentionLayer):
    """Grouped-query attention. Each rank has some query heads, and the key and value heads that
    these read."""

    def __init__(
        self,
        layer_index: int,
        hidden_size: int,
        spec: AttentionSpec,
        *,
        dtype: torch.dtype,
        device: torch.device,
        shard: Shard = ALONE,
    ) -> None:
        super().__init__(layer_index, spec, spec.head_dim, device)
        self.spec, self.shard = spec, shard
        heads, kv_heads = shard.range_of(spec.num_heads), shard.kv_heads_of(spec.num_kv_heads)
        self.head_split = [heads.length, kv_heads.length, kv_heads.length]
        self.num_fused_heads = sum(self.head_split)
        kind: dict[str, Any] = {"dtype": dtype, "device": device}
        self.qkv = _fused_projection(hidden_size, spec, heads, kv_heads, **kind)
        self.output = Linear(
            spec.num_heads * spec.head_dim,
            {"o_proj": hidden_size},
            bias=spec.output_bias,
            columns=heads.of_width(spec.head_dim),
            adds_bias=shard.rank == 0,
            **kind,
        )
        self.sinks: nn.Parameter | None = None
        if spec.has_sinks:
            shape = (spec.num_heads,)
            self.sinks = self.parameter_of("sinks", shape, cut_to([heads], shape), **kind)
        self.traits = AttentionTraits(
            scale=spec.scale, window=spec.window, softcap=spec.softcap, sinks_H=self.sinks
        )
        self.q_norm: RMSNorm | None = None
        self.k_norm: RMSNorm | None = None
        if spec.has_head_norms or spec.has_projection_norms:
            kind |= {"eps": spec.eps, "offset": spec.norm_offset}
            kind |= {"rounds_first": spec.norm_rounds_first}
            all_heads = [(spec.num_heads, heads), (spec.num_kv_heads, kv_heads)]
            if spec.has_head_norms:
                all_heads = [(1, Range(0, 1))] * 2
            self.q_norm, self.k_norm = (
                RMSNorm(num * spec.head_dim, kept=kept.of_width(spec.head_dim), **kind)
                for num, kept in all_heads
            )
        # The attention backend applies head norms together with the rotation, if there is one.
        self.norms_alone = spec.has_projection_norms or (spec.has_head_norms and spec.rope is None)

    def _heads(
        self, x_TE: Tensor, angles: Angles, batch: ForwardBatch
    ) -> tuple[Tensor, Tensor, Tensor, Rotation | None]:
        # Views of one product. Queries and keys are copied only if normed, reordered or scaled.
        fused_heads = self.qkv(x_TE).view(-1, self.num_fused_heads, self.spec.head_dim)
        q_THD, k_TGD, v_TGD = fused_heads.split(self.head_split, dim=1)
        if self.norms_alone:
            q_THD, k_TGD = self._norm(q_THD, k_TGD)
        q_THD, k_TGD = self._ordered(q_THD, k_TGD)
        if self.spec.rope is not None and self.spec.rope.query_growth:
            q_THD = q_THD * _growth(self.spec.rope, batch.positions_T)[:, None, None].to(q_THD)
        return q_THD, k_TGD, v_TGD, self._rotation(angles)

    def _norm(self, q_THD: Tensor, k_TGD: Tensor) -> tuple[Tensor, Tensor]:
        assert self.q_norm is not None
        assert self.k_norm is not None
        if self.spec.has_head_norms:
            return self.q_norm(q_THD), self.k_norm(k_TGD)
        if self.shard.size > 1:
            rows = (self.q_norm, q_THD), (self.k_norm, k_TGD)
            q_THD, k_TGD = norm_cut_rows(self.collectives, *rows)
            return q_THD, k_TGD
        q_THD = self.q_norm(q_THD.flatten(1)).view(q_THD.shape)
        return q_THD, self.k_norm(k_TGD.flatten(1)).view(k_TGD.shape)

    def _rotation(self, angles: Angles) -> Rotation | None:
        """Return the Rotation, with the head norms that the backend must apply; None without a
        rope."""
        if self.spec.rope_index is None:
            return None
        cos_TD, sin_TD = angles[self.spec.rope_index]
        if self.q_norm is None or self.k_norm is None or self.norms_alone:
            return Rotation(cos_TD, sin_TD, rounding=self.rounding)
        q_norm_D, k_norm_D = self.q_norm.scale, self.k_norm.scale
        if self.order_D is not None:
            q_norm_D, k_norm_D = q_norm_D[self.order_D], k_norm_D[self.order_D]
        norms = q_norm_D, k_norm_D, self.q_norm.eps, self.q_norm.rounds_first
        return Rotation(cos_TD, sin_TD, *norms, self.rounding)


def _fused_projection(
    hidden_size: int, spec: AttentionSpec, heads: Range, kv_heads: Range, **kind: Any
) -> Linear:
    """Return one projection that computes query, key and value of this rank's heads."""
    dim = spec.head_dim
    q_size, kv_size = spec.num_heads * dim, spec.num_kv_heads * dim
    parts = {"q_proj": q_size, "k_proj": kv_size, "v_proj": kv_size}
    q, kv = heads.of_width(dim), kv_heads.of_width(dim)
    rows = {"q_proj": [q], "k_proj": [kv], "v_proj": [kv]}
    if spec.is_fused:
        parts = {"qkv_proj": q_size + 2 * kv_size}
        k, v = (kv.of_width(1, after=start) for start in (q_size, q_size + kv_size))
        rows = {"qkv_proj": [q, k, v]}
    return Linear(hidden_size, parts, bias=spec.bias, rows=rows, **kind)


def _growth(rope: RopeSpec, positions_T: Tensor) -> Tensor:
    """Return the factor of queries in Llama 4, [T] float32: 1 + query_growth ln(1 + floor(position
    / original context))."""
    turns_T = (positions_T // rope.original_max_positions).float()
    return 1 + rope.query_growth * torch.log1p(turns_T)
