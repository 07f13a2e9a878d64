"""Family: the differences of one model family from the common decoder, as plain values.

Each file of rollout/models/families makes one. ModelSpec and the decoder read it.
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
)  # names of transformers to those of ModelSpec


def unchanged(value: Any) -> Any:
    """Return `value`: config and spec have the same value."""
    return value


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """A key of a config that gives a field of ModelSpec. `read` converts the key's value to the
    field's, `write` converts it back. `alias`: another name of the key in this family."""

    name: str
    alias: str = ""
    read: Callable[[Any], Any] = unchanged
    write: Callable[[Any], Any] = unchanged


PLAIN_NAMES = MoeNames()


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixture:
    """The kind of a family's mixtures of experts; see RouterSpec for the fields. `has_bias`: the
    router and all experts have one. `names` are the checkpoint's; families whose shared expert has
    a gate name it there."""

    scores: str  # "softmax", "softmax_chosen" or "sigmoid"
    has_correction: bool = False
    has_bias: bool = False
    is_router_float32: bool = False
    names: MoeNames = PLAIN_NAMES


@dataclass(frozen=True, slots=True, kw_only=True)
class BranchNames:
    """The modules of one residual branch, by their names in a checkpoint.

    `is_parallel`: the mixer has the same input as the branch before.
    """

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
# Without effect in inference: losses of a router's training, and what a forward pass returns.
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
    """One `model_type` of Hugging Face configs. `title` names the models that are saved under it.

    `values` gives fields of ModelSpec: a constant, or a Key of the config. `defaults` are the
    values that transformers uses for keys that a config lacks. `keys` lists further keys that the
    family's rules for windows, ropes and experts read. `fixed` has keys of which one value is
    supported. Other values are refused, and this one changes nothing. `ignored` are keys that
    transformers does not read, or reads in training alone. `rope_kinds` are the types of ropes that
    transformers has for the family. `fused` names projections that checkpoints keep as one matrix:
    "qkv_proj", "gate_up_proj". `moe_layers` returns the layers that have experts in place of an
    MLP, and `mixture` is the kind of these experts. `saved_paths` maps parts of the paths of live
    modules to the parts that saved directories have instead.
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
        """Keys that this family reads beside those of all families."""
        keys = [rule for rule in self.values.values() if isinstance(rule, Key)]
        names = {name for key in keys for name in (key.name, key.alias) if name}
        names |= {self.activation_key, self.norm_eps_key}
        if self.ropes is not ropes_by_type:  # beside which transformers ignores it
            names.add("original_max_position_embeddings")
        return self.keys | self.defaults.keys() | names

    def saved_name(self, name: str) -> str:
        """Return the name in saved directories of the weight that a live module calls `name`."""
        for live, saved in self.saved_paths.items():
            name = name.replace(live, saved)
        return name
