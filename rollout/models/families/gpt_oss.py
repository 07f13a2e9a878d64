"""GPT_OSS: the Family of GPT-OSS, listed in `families.registry`. These models have attention sinks,
windows on every second layer, biases in attention and experts, and a clamped activation. Router
weights are a softmax over the chosen experts."""

from rollout.layers.experts import MoeNames
from rollout.models.family import ATTENTION_BIAS, ROUTER_LOSSES, Family, Key, Mixture
from rollout.models.layer_rules import experts_everywhere, windows_by_type

_YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "original_max_position_embeddings": 4096,
    "truncate": False,
}
GPT_OSS = Family(
    name="gpt_oss",
    title="gpt-oss-20b, 120b",
    architecture="GptOssForCausalLM",
    values={
        "attention_sinks": True,
        "norm_rounds_first": False,
        "activation_alpha": Key(name="swiglu_alpha"),
        "activation_limit": Key(name="swiglu_limit"),
        "num_experts": Key(name="num_local_experts", alias="num_experts"),
        "experts_per_token": Key(name="num_experts_per_tok"),
        "expert_size": Key(name="intermediate_size"),
        **ATTENTION_BIAS,
    },
    defaults={
        "attention_bias": True,
        "head_dim": 64,
        "num_experts_per_tok": 4,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "rope_parameters": _YARN,
        "rope_theta": 150_000.0,
        "sliding_window": 128,
        "swiglu_alpha": 1.702,
        "swiglu_limit": 7.0,
    },
    keys=frozenset({"layer_types"}),
    ignored=ROUTER_LOSSES | {"experts_per_token", "initial_context_length"},
    windows=windows_by_type(full_every=2),
    activations={"silu": "clamped_swiglu"},
    moe_layers=experts_everywhere,
    mixture=Mixture(
        scores="softmax_chosen",
        has_bias=True,
        names=MoeNames(router="router", is_transposed=True),
    ),
)
