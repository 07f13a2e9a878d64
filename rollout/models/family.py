"""Family: how one model family differs from the common decoder, as plain values.

A Family has a file in `rollout.models.families`. Used by ModelSpec, and by `config_keys`,
`families.registry`, `layout` and `decoder` of `rollout.models`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, TypeAlias

from rollout.layers.experts import MoeNames
from rollout.layers.rope import ROPE_KINDS, RopeSpec
from rollout.models.layer_rules import no_experts, no_windows, ropes_by_type, same_rope

Config: TypeAlias = Mapping[str, Any]
WindowRule: TypeAlias = Callable[[Config, int], tuple[int | None, ...]]
RopeRule: TypeAlias = Callable[[Config, tuple[int | None, ...]], tuple[RopeSpec | None, ...]]
MoeRule: TypeAlias = Callable[[Config, int], tuple[int, ...]]


ACTIVATIONS: Mapping[str, str] = MappingProxyType(
    {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
)  # transformers' names of activations to ModelSpec's names


def unchanged(value: Any) -> Any:
    """Return `value`. `read` and `write` of a Key are this function by default."""
    return value


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """A config key that gives a field of ModelSpec. `alias` is a second name of the key in this
    family; "" if it has none. `read` converts the key's value to the field's value, and `write`
    converts it back."""

    name: str
    alias: str = ""
    read: Callable[[Any], Any] = unchanged
    write: Callable[[Any], Any] = unchanged


PLAIN_NAMES = MoeNames()


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixture:
    """A family's kind of mixture of experts. RouterSpec explains `scores`, `has_correction`
    and, as `is_float32`, `is_router_float32`. `has_bias` says whether the router and all experts
    have biases. `names` has the modules' names in checkpoints."""

    scores: str  # "softmax", "softmax_chosen" or "sigmoid"
    has_correction: bool = False
    has_bias: bool = False
    is_router_float32: bool = False
    names: MoeNames = PLAIN_NAMES


@dataclass(frozen=True, slots=True, kw_only=True)
class BranchNames:
    """Checkpoint names of the modules of one residual branch. A missing norm has the name None.
    `is_parallel` says whether the mixer gets the same input as the mixer of the branch before."""

    mixer: str
    norm_before: str | None = None
    norm_after: str | None = None
    is_parallel: bool = False


PRE_NORM = (
    BranchNames(mixer="self_attn", norm_before="input_layernorm"),
    BranchNames(mixer="mlp", norm_before="post_attention_layernorm"),
)
SANDWICH = (
    BranchNames(
        mixer="self_attn", norm_before="input_layernorm", norm_after="post_attention_layernorm"
    ),
    BranchNames(
        mixer="mlp",
        norm_before="pre_feedforward_layernorm",
        norm_after="post_feedforward_layernorm",
    ),
)
POST_NORM = (
    BranchNames(mixer="self_attn", norm_after="post_attention_layernorm"),
    BranchNames(mixer="mlp", norm_after="post_feedforward_layernorm"),
)
PARALLEL = (
    BranchNames(mixer="self_attn", norm_before="input_layernorm"),
    BranchNames(mixer="mlp", is_parallel=True),
)
QKV_BIAS = {"attention_bias": Key(name="attention_bias")}
ATTENTION_BIAS = QKV_BIAS | {"attention_output_bias": Key(name="attention_bias")}
MLP_BIAS = {"mlp_bias": Key(name="mlp_bias")}
# Without effect in inference: a router's training losses, and whether logits are returned.
ROUTER_LOSSES = frozenset({"output_router_logits", "router_aux_loss_coef", "router_jitter_noise"})
GROUPED_EXPERTS = {
    "num_experts": Key(name="n_routed_experts", alias="num_local_experts"),
    "experts_per_token": Key(name="num_experts_per_tok"),
    "expert_size": Key(name="moe_intermediate_size"),
    "num_shared_experts": Key(name="n_shared_experts"),
    "router_normalizes": Key(name="norm_topk_prob"),
    "router_scale": Key(name="routed_scaling_factor"),
    "num_expert_groups": Key(name="n_group"),
    "num_chosen_groups": Key(name="topk_group"),
    "num_mtp_layers": Key(name="num_nextn_predict_layers", alias="num_mtp_layers"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One `model_type` of Hugging Face configs, its `name`. `title` names the models that have it.

    `values` gives fields of ModelSpec, each a constant or a Key of the config. `defaults` has the
    values that transformers uses for absent keys. `windows`, `ropes` and `moe_layers` are rules of
    `rollout.models.layer_rules`, and `keys` has further keys that these rules read. `fixed` maps a
    key to its only supported values, which change nothing. `ignored` has keys without effect on
    inference. `rope_kinds` has the RoPE types that transformers supports for the family. `fused`
    has the projections that checkpoints store as one matrix: "qkv_proj", "gate_up_proj". `mixture`
    is the kind of the experts that replace the MLP in some layers. `saved_paths` maps substrings of
    live modules' weight names to substrings in saved directories. `activations` maps values of the
    config key `activation_key` to ModelSpec's names.
    """

    name: str
    title: str
    architecture: str
    branches: tuple[BranchNames, ...] = PRE_NORM
    values: Mapping[str, Any] = field(default_factory=dict)
    defaults: Config = field(default_factory=dict)
    keys: frozenset[str] = frozenset()
    fixed: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    ignored: frozenset[str] = frozenset()
    fused: frozenset[str] = frozenset()
    windows: WindowRule = no_windows
    ropes: RopeRule = same_rope
    rope_kinds: tuple[str, ...] = ROPE_KINDS
    moe_layers: MoeRule = no_experts
    mixture: Mixture | None = None
    saved_paths: Mapping[str, str] = field(default_factory=dict)
    norm_eps_key: str = "rms_norm_eps"
    activation_key: str = "hidden_act"
    activations: Mapping[str, str] = field(default_factory=lambda: ACTIVATIONS)
    has_latent_attention: bool = False
    has_interleaved_rope: bool = False
    has_sqrt_embedding: bool = False
    has_query_growth: bool = False

    @property
    def read_keys(self) -> frozenset[str]:
        """Config keys that this family reads, in addition to `config_keys.READ`."""
        keys = [rule for rule in self.values.values() if isinstance(rule, Key)]
        names = {name for key in keys for name in (key.name, key.alias) if name}
        names |= {self.activation_key, self.norm_eps_key}
        if self.ropes is not ropes_by_type:  # transformers ignores the key for ropes per type
            names.add("original_max_position_embeddings")
        return self.keys | self.defaults.keys() | names

    def saved_name(self, name: str) -> str:
        """Return the name that saved directories give to the live module's weight `name`."""
        for live, saved in self.saved_paths.items():
            name = name.replace(live, saved)
        return name
