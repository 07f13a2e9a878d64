"""GLM4_MOE: the Family of GLM-4.5, 4.6 and 4.7, listed in `families.registry`. The first layers
have MLPs. The other layers have groups of experts and a shared expert. The router scores experts by
a sigmoid, and adds a correction to choose them."""

from rollout.models.family import GROUPED_EXPERTS, QKV_BIAS, ROUTER_LOSSES, Family, Key, Mixture
from rollout.models.layer_rules import experts_after_first

GLM4_MOE = Family(
    name="glm4_moe",
    title="GLM-4.5, 4.6, 4.7",
    architecture="Glm4MoeForCausalLM",
    values={
        "qk_norm": Key(name="use_qk_norm"),
        **GROUPED_EXPERTS,
        **QKV_BIAS,
    },
    defaults={
        "first_k_dense_replace": 1,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_experts_per_tok": 8,
        "num_key_value_heads": 8,
        "num_nextn_predict_layers": 1,
        "partial_rotary_factor": 0.5,
        "rms_norm_eps": 1e-5,
    },
    ignored=ROUTER_LOSSES,
    moe_layers=experts_after_first,
    mixture=Mixture(scores="sigmoid", has_correction=True, is_router_float32=True),
)
