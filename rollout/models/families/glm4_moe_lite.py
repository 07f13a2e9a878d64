"""GLM4_MOE_LITE: the Family of GLM-4.7-Flash, listed in `families.registry`. The model has
DeepSeek-V3's attention and GLM-4.5's experts. By default all layers but the first have experts."""

from rollout.models.family import ATTENTION_BIAS, GROUPED_EXPERTS, ROUTER_LOSSES, Family, Mixture
from rollout.models.layer_rules import experts_by_type

GLM4_MOE_LITE = Family(
    name="glm4_moe_lite",
    title="GLM-4.7-Flash",
    architecture="Glm4MoeLiteForCausalLM",
    values=GROUPED_EXPERTS | ATTENTION_BIAS,
    defaults={
        "kv_lora_rank": 512,
        "moe_intermediate_size": 1536,
        "n_group": 1,
        "n_routed_experts": 64,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_experts_per_tok": 4,
        "num_key_value_heads": 20,
        "q_lora_rank": 768,
        "qk_nope_head_dim": 192,
        "qk_rope_head_dim": 64,
        "rms_norm_eps": 1e-5,
        "rope_interleave": True,
        "routed_scaling_factor": 1.8,
        "topk_group": 1,
        "v_head_dim": 256,
    },
    keys=frozenset({"mlp_layer_types"}),
    fixed={
        "topk_method": ("noaux_tc",),
        "first_k_dense_replace": (1,),
        "partial_rotary_factor": (1.0,),
    },
    ignored=ROUTER_LOSSES | {"qk_head_dim"},  # follows from other keys
    moe_layers=experts_by_type,
    mixture=Mixture(scores="sigmoid", has_correction=True, is_router_float32=True),
    has_latent_attention=True,
    has_interleaved_rope=True,
)
