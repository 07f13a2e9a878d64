"""OLMOE: the Family of OLMoE, listed in `families.registry`. Every layer has experts. Queries and
keys are normed over all heads together."""

from rollout.models.family import ATTENTION_BIAS, ROUTER_LOSSES, Family, Key, Mixture
from rollout.models.layer_rules import experts_everywhere

OLMOE = Family(
    name="olmoe",
    title="OLMoE 1B-7B",
    architecture="OlmoeForCausalLM",
    values={
        "qk_norm": True,
        "qk_norm_whole": True,
        "num_experts": Key(name="num_experts", alias="num_local_experts"),
        "experts_per_token": Key(name="num_experts_per_tok"),
        "expert_size": Key(name="intermediate_size"),
        "router_normalizes": Key(name="norm_topk_prob"),
        **ATTENTION_BIAS,
    },
    defaults={"num_experts_per_tok": 8, "rms_norm_eps": 1e-5},
    ignored=ROUTER_LOSSES,
    moe_layers=experts_everywhere,
    mixture=Mixture(scores="softmax"),
)
