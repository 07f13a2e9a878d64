"""DEEPSEEK_V3: the Family of DeepSeek-V3 and Moonlight, listed in `families.registry`. These models
have latent attention. The first layers have MLPs, and the other layers have experts."""

from rollout.models.family import ATTENTION_BIAS, GROUPED_EXPERTS, ROUTER_LOSSES, Family, Mixture
from rollout.models.layer_rules import experts_after_first

DEEPSEEK_V3 = Family(
    name="deepseek_v3",
    title="DeepSeek-V3, DeepSeek-R1, Moonlight",
    architecture="DeepseekV3ForCausalLM",
    values=GROUPED_EXPERTS | ATTENTION_BIAS,
    defaults={
        "first_k_dense_replace": 3,
        "kv_lora_rank": 512,
        "moe_intermediate_size": 2048,
        "n_group": 8,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_experts_per_tok": 8,
        "num_key_value_heads": 128,
        "num_nextn_predict_layers": 1,
        "q_lora_rank": 1536,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "rope_interleave": True,
        "routed_scaling_factor": 2.5,
        "topk_group": 4,
        "v_head_dim": 128,
    },
    fixed={"scoring_func": ("sigmoid",), "topk_method": ("noaux_tc",), "moe_layer_freq": (1,)},
    # `qk_head_dim` follows from other keys; the last three matter in training only.
    ignored=ROUTER_LOSSES | {"qk_head_dim", "aux_loss_alpha", "seq_aux", "ep_size"},
    moe_layers=experts_after_first,
    mixture=Mixture(scores="sigmoid", has_correction=True, is_router_float32=True),
    has_latent_attention=True,
    has_interleaved_rope=True,
)
