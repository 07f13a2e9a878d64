"""The residual branches of each layer, with the mixer of each branch (attention, MLP or experts).

Used by `rollout.models.decoder`, which builds the modules that `layers_of` describes. Pure
functions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from rollout.backends.base import GatedActivation
from rollout.layers.attention import AttentionSpec
from rollout.layers.experts import MoeSpec, RouterSpec
from rollout.layers.latent_attention import LatentAttentionSpec, LatentDims
from rollout.layers.mlp import MlpSpec
from rollout.layers.rope import yarn_scale
from rollout.models.families.registry import find_family
from rollout.models.family import BranchNames, Family
from rollout.models.spec import ModelSpec

MixerSpec: TypeAlias = AttentionSpec | LatentAttentionSpec | MlpSpec | MoeSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class BranchSpec:
    """A residual branch: x + residual_multiplier * norm_after(mixer(norm_before(x))). `names` has
    the checkpoint's names of the mixer and of the norms."""

    names: BranchNames
    mixer: MixerSpec


def layers_of(spec: ModelSpec) -> list[tuple[BranchSpec, ...]]:
    """Return each layer's branches in the order in which they run."""
    family = find_family(spec.family)
    layers = []
    for index in range(spec.num_layers):
        mixers: dict[str, MixerSpec] = {
            "self_attn": _attention(spec, family, index)
            if spec.latent is None
            else _latent_attention(spec, spec.latent, index),
            "mlp": _mlp(spec, family, spec.intermediate_size),
        }
        if index in spec.moe_layers:
            mixers["mlp"] = _mixture(spec, family, spec.moe_layers.index(index))
        layers.append(
            tuple(BranchSpec(names=names, mixer=mixers[names.mixer]) for names in family.branches)
        )
    return layers


def _attention(spec: ModelSpec, family: Family, layer: int) -> AttentionSpec:
    rope = spec.ropes[layer] if spec.ropes else spec.rope
    return AttentionSpec(
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        bias=spec.attention_bias,
        output_bias=spec.attention_output_bias,
        is_fused="qkv_proj" in family.fused,
        has_head_norms=spec.qk_norm and not spec.qk_norm_whole,
        has_projection_norms=spec.qk_norm and spec.qk_norm_whole,
        eps=spec.rms_norm_eps,
        norm_offset=spec.norm_offset,
        norm_rounds_first=spec.norm_rounds_first,
        rotary_rounding=spec.rotary_rounding,
        rope=rope,
        rope_index=None if rope is None else spec.distinct_ropes.index(rope),
        scale=spec.attention_scale,
        window=spec.windows[layer] if spec.windows else None,
        softcap=spec.attention_softcap,
        has_sinks=spec.attention_sinks,
    )


def _latent_attention(spec: ModelSpec, dims: LatentDims, layer: int) -> LatentAttentionSpec:
    rope = spec.ropes[layer] if spec.ropes else spec.rope
    assert rope is not None, "latent attention needs a rope"
    # As in DeepSeek-V3's code: yarn's scale once for queries and once for keys.
    yarn = yarn_scale(rope.factor, rope.mscale_all_dim)
    return LatentAttentionSpec(
        num_heads=spec.num_heads,
        dims=dims,
        bias=spec.attention_bias,
        output_bias=spec.attention_output_bias,
        rope=rope,
        rope_index=spec.distinct_ropes.index(rope),
        scale=spec.attention_scale or dims.query_dim**-0.5 * yarn * yarn,
        norm_rounds_first=spec.norm_rounds_first,
        rotary_rounding=spec.rotary_rounding,
    )


def _mlp(spec: ModelSpec, family: Family, intermediate_size: int) -> MlpSpec:
    return MlpSpec(
        intermediate_size=intermediate_size,
        bias=spec.mlp_bias,
        activation=spec.activation,
        is_fused="gate_up_proj" in family.fused,
    )


def _mixture(spec: ModelSpec, family: Family, moe_index: int) -> MoeSpec:
    mixture = family.mixture
    assert mixture is not None, family.name
    router = RouterSpec(
        num_experts=spec.num_experts,
        experts_per_token=spec.experts_per_token,
        scores=mixture.scores,
        normalizes=spec.router_normalizes,
        scale=spec.router_scale,
        has_correction=mixture.has_correction,
        num_groups=spec.num_expert_groups,
        num_chosen_groups=spec.num_chosen_groups,
        has_bias=mixture.has_bias,
        is_float32=mixture.is_router_float32,
    )
    shared_size = spec.num_shared_experts * (spec.shared_expert_size or spec.expert_size)
    return MoeSpec(
        moe_index=moe_index,
        router=router,
        expert_size=spec.expert_size,
        activation=GatedActivation(
            kind=spec.activation, alpha=spec.activation_alpha, limit=spec.activation_limit
        ),
        has_expert_bias=mixture.has_bias,
        shared=_mlp(spec, family, shared_size) if shared_size else None,
        names=mixture.names,
    )
