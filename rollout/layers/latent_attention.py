"""LatentAttention: multi-head latent attention, computed on the latents that the KV cache keeps.

Used for families like DeepSeek by `rollout.models.decoder`, which runs it, by `rollout.models.spec`
and `rollout.models.layout`, which make its specs, and by `rollout.models.causal_lm`, which finds
its HeadProjections. A forward pass writes only the KV cache, through the attention backend. Shape
letters: T tokens, E hidden size, H heads, R latent rank, N dims of a head that are not rotated, P
dims that the rope rotates, D = R + P cached dims, V value dims of a head. Source: DeepSeek-AI 2024,
"DeepSeek-V2", sec. 2.1 and appendix C.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from rollout.backends.forward_batch import AttentionTraits, ForwardBatch, Rotation
from rollout.errors import ModelError
from rollout.layers.attention import Angles, AttentionLayer, AttentionLayerSpec
from rollout.layers.base import BackendLayer
from rollout.layers.linear import Linear
from rollout.layers.norm import RMSNorm
from rollout.layers.rope import RopeSpec
from rollout.layers.shard import ALONE, Range, Shard, cut_to

LATENT_NORM_EPS = 1e-6  # in all published models, whatever the eps of their other norms


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentDims:
    """Sizes of latent attention, under the names that Hugging Face configs use. `q_lora_rank` is
    None if queries are projected directly from the hidden state. Raises ModelError for a size that
    is not a positive integer and for an odd `qk_rope_head_dim`."""

    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int

    def __post_init__(self) -> None:
        for name in (field.name for field in fields(self)):
            value = getattr(self, name)
            if value is None and name == "q_lora_rank":
                continue
            if not isinstance(value, int) or value < 1:
                raise ModelError(f"{name}={value!r} must be a positive integer")
        if self.qk_rope_head_dim % 2:
            raise ModelError(f"qk_rope_head_dim={self.qk_rope_head_dim} must be even")

    @property
    def query_dim(self) -> int:
        """Dims N + P of a query head, before the N dims are mapped to R dims of the latent."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def cached_dim(self) -> int:
        """Dims D that the cache keeps per token: the latent, and the rotated key that all heads
        share."""
        return self.kv_lora_rank + self.qk_rope_head_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentAttentionSpec(AttentionLayerSpec):
    dims: LatentDims
    rope: RopeSpec
    rope_index: int
    scale: float


class HeadProjections(BackendLayer):
    """The weight `kv_b_proj`, [H (N + V), R], which maps a latent to keys and values of H heads.
    LatentAttention never expands latents. It multiplies queries by the key part of the weight, and
    weighted sums of latents by the value part."""

    def __init__(
        self,
        num_heads: int,
        dims: LatentDims,
        *,
        dtype: torch.dtype,
        device: torch.device,
        kept: Range | None = None,
    ) -> None:
        """`kept` is the range of heads that this rank has; None means all `num_heads`."""
        super().__init__()
        kept = kept or Range(0, num_heads)
        self.split = [dims.qk_nope_head_dim, dims.v_head_dim]
        self.shape = (kept.length, sum(self.split), dims.kv_lora_rank)
        shape = num_heads * sum(self.split), dims.kv_lora_rank
        cut = cut_to([kept.of_width(sum(self.split))], shape)
        self.weight = self.parameter_of("weight", shape, cut, dtype=dtype, device=device)

    def parts(self) -> tuple[Tensor, Tensor]:
        """Return keys_HNR and values_HVR, views of the weight."""
        keys_HNR, values_HVR = self.weight.view(self.shape).split(self.split, dim=1)
        return keys_HNR, values_HVR


class LatentAttention(AttentionLayer):
    """Multi-head latent attention.

    The cache keeps one head of D dims per token: the normed latent of R dims, and the rotated key
    of P dims. All query heads use this head as their key, and its latent as their value. The N dims
    of a query are mapped to R dims, so that its scores equal scores with expanded keys of N + P
    dims. Each rank has some query heads, and all ranks cache the same latents.
    """

    def __init__(
        self,
        layer_index: int,
        hidden_size: int,
        spec: LatentAttentionSpec,
        *,
        dtype: torch.dtype,
        device: torch.device,
        shard: Shard = ALONE,
    ) -> None:
        dims, kept = spec.dims, shard.range_of(spec.num_heads)
        super().__init__(layer_index, spec, dims.qk_rope_head_dim, device)
        self.spec = spec
        rank, query_size = dims.q_lora_rank, spec.num_heads * dims.query_dim
        kind: dict[str, Any] = {"dtype": dtype, "device": device}
        query = {"q_proj": query_size} if rank is None else {"q_a_proj": rank}
        latent = {"kv_a_proj_with_mqa": dims.cached_dim}
        rows = {name: [kept.of_width(dims.query_dim)] for name in ("q_proj", "q_b_proj")}
        self.input = Linear(hidden_size, query | latent, bias=spec.bias, rows=rows, **kind)
        norm_kind = kind | {"rounds_first": spec.norm_rounds_first}
        self.input_split = [*self.input.parts.values()]
        self.q_a_layernorm: RMSNorm | None = None
        self.q_b: Linear | None = None
        if rank is not None:
            self.q_a_layernorm = RMSNorm(rank, LATENT_NORM_EPS, **norm_kind)
            self.q_b = Linear(rank, {"q_b_proj": query_size}, bias=False, rows=rows, **kind)
        self.kv_a_layernorm = RMSNorm(dims.kv_lora_rank, LATENT_NORM_EPS, **norm_kind)
        self.kv_b_proj = HeadProjections(spec.num_heads, dims, kept=kept, **kind)
        self.output = Linear(
            spec.num_heads * dims.v_head_dim,
            {"o_proj": hidden_size},
            bias=spec.output_bias,
            columns=kept.of_width(dims.v_head_dim),
            adds_bias=shard.rank == 0,
            **kind,
        )
        self.traits = AttentionTraits(scale=spec.scale)

    def _heads(
        self, x_TE: Tensor, angles: Angles, batch: ForwardBatch
    ) -> tuple[Tensor, Tensor, Tensor, Rotation | None]:
        """Return queries mapped to D dims, the key to cache, and the key's latent part as the
        value. The Rotation is None, because queries and keys are rotated already."""
        dims = self.spec.dims
        query, cached_TD = self.input(x_TE).split(self.input_split, dim=1)
        if self.q_b is not None and self.q_a_layernorm is not None:
            query = self.q_b(self.q_a_layernorm(query))
        q_THN, q_THP = query.unflatten(1, (-1, dims.query_dim)).split(
            [dims.qk_nope_head_dim, dims.qk_rope_head_dim], dim=2
        )
        latent_TR, k_TP = cached_TD.split([dims.kv_lora_rank, dims.qk_rope_head_dim], dim=1)
        q_THP, k_T1P = self._ordered(q_THP, k_TP.unsqueeze(1))
        q_THP, k_T1P = self.ops.rotary(q_THP, k_T1P, *angles[self.spec.rope_index], self.rounding)
        keys_HNR, _ = self.kv_b_proj.parts()
        q_HTR = torch.bmm(q_THN.transpose(0, 1), keys_HNR)
        q_THD = torch.cat((q_HTR.transpose(0, 1), q_THP), dim=2)
        k_T1D = torch.cat((self.kv_a_layernorm(latent_TR).unsqueeze(1), k_T1P), dim=2)
        return q_THD, k_T1D, k_T1D[..., : dims.kv_lora_rank], None

    def _values(self, context_THD: Tensor) -> Tensor:
        """Return each head's output, [T, H, V], given its weighted sum of latents."""
        _, values_HVR = self.kv_b_proj.parts()
        context_HTV = torch.bmm(context_THD.transpose(0, 1), values_HVR.transpose(1, 2))
        return context_HTV.transpose(0, 1)
