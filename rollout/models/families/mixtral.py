"""MIXTRAL: the Family of Mixtral models, listed in `families.registry`. Every layer has experts,
and a token's router weights sum to 1. `minimax_m2` imports SPARSE_BLOCK and W_NAMES."""

from rollout.layers.experts import MoeNames
from rollout.models.family import ROUTER_LOSSES, Family, Key, Mixture
from rollout.models.layer_rules import experts_everywhere, same_window

SPARSE_BLOCK = {".mlp.": ".block_sparse_moe."}
W_NAMES = MoeNames(gate="w1", up="w3", down="w2")
MIXTRAL = Family(
    name="mixtral",
    title="Mixtral 8x7B, 8x22B",
    architecture="MixtralForCausalLM",
    values={
        "num_experts": Key(name="num_local_experts", alias="num_experts"),
        "experts_per_token": Key(name="num_experts_per_tok"),
        "expert_size": Key(name="intermediate_size"),
        "router_normalizes": True,
    },
    defaults={
        "num_experts_per_tok": 2,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1_000_000.0,
    },
    keys=frozenset({"sliding_window"}),
    ignored=ROUTER_LOSSES,
    windows=same_window,
    moe_layers=experts_everywhere,
    mixture=Mixture(scores="softmax", names=W_NAMES),
    saved_paths=SPARSE_BLOCK,
)
