"""A tiny random model of each family, with what its configs can switch on; `docs/models.md` lists
what is tested with them.
"""

from __future__ import annotations

from typing import Any

from transformers import GptOssConfig

from tests.tiny_models import tiny_model

WINDOW = 11  # tokens: shorter than prompts, and no multiple of a block
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 64,
}
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.1, 1.3, 1.6, 2.0, 2.5],
    "long_factor": [1.0, 2.0, 4.0, 8.0, 16.0, 32.0],
    "factor": 4.0,
}
# Transformers before 5.18 has one limit, which no config changes.
_GPT_OSS_LIMIT = {"swiglu_limit": 1.5} if hasattr(GptOssConfig(), "swiglu_limit") else {}
EXPERTS = {
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
}
LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "head_dim": 8,  # what positions turn, in configs of latent attention
    "v_head_dim": 20,
}
GROUPED_EXPERTS = {
    "num_hidden_layers": 3,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
}
FAMILY_CASES: dict[str, dict[str, Any]] = {
    "llama": {"mlp_bias": True},
    "qwen2": {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1},
    "qwen3": {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1},
    "mistral": {"sliding_window": WINDOW},
    "ministral": {
        "sliding_window": WINDOW,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "ministral3": {"rope_parameters": YARN | {"llama_4_scaling_beta": 0.3}},
    "phi3": {
        "hidden_size": 64,
        "sliding_window": WINDOW,
        "partial_rotary_factor": 0.75,
        "original_max_position_embeddings": 256,
        "rope_scaling": LONGROPE,
    },
    "olmo2": {"hidden_size": 64},
    "olmo3": {
        "hidden_size": 64,
        "sliding_window": WINDOW,
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {
            "full_attention": YARN,
            "sliding_attention": {"rope_type": "default", "rope_theta": 1000.0},
        },
    },
    "smollm3": {"hidden_size": 64, "no_rope_layer_interval": 2},
    "seed_oss": {"attention_out_bias": True},
    "granite": {
        "hidden_size": 64,
        "embedding_multiplier": 12.0,
        "residual_multiplier": 0.22,
        "attention_multiplier": 0.1,
        "logits_scaling": 0.5,
    },
    "glm4": {},
    "gemma": {"tie_word_embeddings": True},
    "gemma2": {
        "sliding_window": WINDOW,
        "query_pre_attn_scalar": 20,
        "attn_logit_softcapping": 5.0,
        "final_logit_softcapping": 8.0,
    },
    "gemma3_text": {
        "sliding_window": WINDOW,
        "query_pre_attn_scalar": 20,
        "layer_types": ["sliding_attention", "full_attention"],
        "tie_word_embeddings": True,
    },
    "cohere2": {
        "hidden_size": 64,
        "sliding_window": WINDOW,
        "layer_types": ["sliding_attention", "full_attention"],
        "logit_scale": 0.5,
    },
    "qwen3_moe": {
        "num_hidden_layers": 3,
        "mlp_only_layers": [1],
        "norm_topk_prob": True,
        "use_sliding_window": True,
        "sliding_window": WINDOW,
        **EXPERTS,
    },
    "qwen2_moe": {
        "num_hidden_layers": 3,
        "decoder_sparse_step": 2,
        "shared_expert_intermediate_size": 40,
        "use_sliding_window": True,
        "sliding_window": WINDOW,
        "max_window_layers": 2,
        "norm_topk_prob": False,
        **EXPERTS,
    },
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": WINDOW},
    "olmoe": {"hidden_size": 64, "num_experts": 8, "num_experts_per_tok": 3},
    "gpt_oss": {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": WINDOW,
        **_GPT_OSS_LIMIT,
        "rope_parameters": YARN | {"truncate": False},
    },
    "minimax_m2": {
        "num_local_experts": 8,
        "num_experts_per_tok": 3,
        "rotary_dim": 8,
        # Without it Transformers 5.17 turns whole heads.
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 5_000_000.0,
            "partial_rotary_factor": 0.5,
        },
    },
    "glm4_moe": {
        **GROUPED_EXPERTS,
        "first_k_dense_replace": 1,
        "n_shared_experts": 2,
        "n_group": 4,
        "topk_group": 2,
        "routed_scaling_factor": 1.8,
        "use_qk_norm": True,
    },
    "deepseek_v3": {
        **LATENT,
        **GROUPED_EXPERTS,
        "q_lora_rank": 20,
        "attention_bias": True,
        "first_k_dense_replace": 1,
        "n_group": 4,
        "topk_group": 2,
        "rope_parameters": YARN | {"mscale": 1.3, "mscale_all_dim": 0.7},
    },
    "deepseek_v3 as Moonlight": {
        **LATENT,
        **GROUPED_EXPERTS,
        "q_lora_rank": None,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
        "n_shared_experts": 2,
        "rope_interleave": False,  # unlike the published one, for the sake of the test
    },
    "glm4_moe_lite": {
        **LATENT,
        **GROUPED_EXPERTS,
        "q_lora_rank": 20,
        "mlp_layer_types": ["dense", "sparse", "dense"],
    },
}


def family_model(case: str, seed: int = 0) -> Any:
    """The case's transformers model. Only its eager attention applies every trait."""
    return tiny_model(family_of(case), seed=seed, attention="eager", **FAMILY_CASES[case])


def family_of(case: str) -> str:
    """The case's family: its first word."""
    return case.split()[0]
