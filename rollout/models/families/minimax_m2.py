"""MINIMAX_M2: the Family of MiniMax-M2, listed in `families.registry`. Router scores are sigmoids,
and a correction bias is stored beside the router. Queries and keys are normed over all heads
together. RoPE covers a part of each head."""

from dataclasses import replace

from rollout.models.families.mixtral import SPARSE_BLOCK, W_NAMES
from rollout.models.family import ROUTER_LOSSES, Family, Key, Mixture
from rollout.models.layer_rules import experts_everywhere

MINIMAX_M2 = Family(
    name="minimax_m2",
    title="MiniMax-M2",
    architecture="MiniMaxM2ForCausalLM",
    values={
        "qk_norm": True,
        "qk_norm_whole": True,
        "num_experts": Key(name="num_local_experts", alias="num_experts"),
        "experts_per_token": Key(name="num_experts_per_tok"),
        "expert_size": Key(name="intermediate_size"),
        "router_normalizes": True,
    },
    defaults={
        "head_dim": 128,
        "num_experts_per_tok": 8,
        "num_key_value_heads": 8,
        "rope_theta": 5_000_000.0,
    },
    keys=frozenset({"partial_rotary_factor", "rotary_dim"}),
    # Published configs have these keys, always with these values.
    fixed={
        "layernorm_full_attention_beta": (1.0,),
        "layernorm_linear_attention_beta": (1.0,),
        "layernorm_mlp_beta": (1.0,),
        "qk_norm_type": ("per_layer",),
        "scoring_func": ("sigmoid",),
        "use_qk_norm": (True,),
        "use_routing_bias": (True,),
    },
    # The last three describe heads for multi-token prediction.
    ignored=ROUTER_LOSSES
    | {"attn_type_list", "mlp_intermediate_size", "shared_moe_mode"}
    | {"use_mtp", "num_mtp_modules", "mtp_transformer_layers"},
    moe_layers=experts_everywhere,
    mixture=Mixture(
        scores="sigmoid",
        has_correction=True,
        names=replace(W_NAMES, is_correction_of_router=False),
    ),
    saved_paths=SPARSE_BLOCK,
)
