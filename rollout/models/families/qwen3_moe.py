"""QWEN3_MOE: the Family of Qwen3-MoE, listed in `families.registry`. These models have Qwen3's
attention. Router scores are a softmax over all experts."""

from rollout.models.family import ATTENTION_BIAS, ROUTER_LOSSES, Family, Key, Mixture
from rollout.models.layer_rules import experts_by_step, same_window_if_used

QWEN3_MOE = Family(
    name="qwen3_moe",
    title="Qwen3-30B-A3B, 235B-A22B, Qwen3-Coder",
    architecture="Qwen3MoeForCausalLM",
    values={
        "qk_norm": True,
        "num_experts": Key(name="num_experts", alias="num_local_experts"),
        "experts_per_token": Key(name="num_experts_per_tok"),
        "expert_size": Key(name="moe_intermediate_size"),
        "router_normalizes": Key(name="norm_topk_prob"),
        **ATTENTION_BIAS,
    },
    defaults={
        "decoder_sparse_step": 1,
        "num_experts_per_tok": 8,
        "num_key_value_heads": 4,
        "sliding_window": 4096,
        "use_sliding_window": False,
    },
    keys=frozenset({"mlp_only_layers"}),
    # Qwen3-Coder's config has this key.
    fixed={"use_qk_norm": (True,)},
    ignored=ROUTER_LOSSES | {"max_window_layers"},
    windows=same_window_if_used,
    moe_layers=experts_by_step,
    mixture=Mixture(scores="softmax"),
)
