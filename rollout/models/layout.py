"""The layers of a model: each is a list of residual branches around one mixer each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from rollout.layers.attention import AttentionSpec
from rollout.layers.mlp import MlpSpec
from rollout.models.families.registry import find_family
from rollout.models.family import BranchNames, Family
from rollout.models.spec import ModelSpec

MixerSpec: TypeAlias = AttentionSpec | MlpSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class BranchSpec:
    """x + multiplier * norm_after(mixer(norm_before(x))); `names` are those of the checkpoint."""

    names: BranchNames
    mixer: MixerSpec


def layers_of(spec: ModelSpec) -> list[tuple[BranchSpec, ...]]:
    """The branches of each layer, in order."""
    family = find_family(spec.family)
    layers = []
    for index in range(spec.num_layers):
        mixers: dict[str, MixerSpec] = {
            "self_attn": _attention(spec, family, index),
            "mlp": MlpSpec(
                intermediate_size=spec.intermediate_size,
                bias=spec.mlp_bias,
                activation=spec.activation,
                is_fused="gate_up_proj" in family.fused,
            ),
        }
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
        rope=rope,
        rope_index=None if rope is None else spec.distinct_ropes.index(rope),
        scale=spec.attention_scale,
        window=spec.windows[layer] if spec.windows else None,
        softcap=spec.attention_softcap,
    )
