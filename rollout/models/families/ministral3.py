"""MINISTRAL3: the Family of Ministral 3 (text), listed in `families.registry`. These models have
YaRN, and scale queries by the logarithm of their position."""

from rollout.models.family import Family
from rollout.models.layer_rules import same_window

_YARN = {
    "rope_type": "yarn",
    "rope_theta": 1_000_000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "llama_4_scaling_beta": 0.1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
MINISTRAL3 = Family(
    name="ministral3",
    title="Ministral 3 (text)",
    architecture="Ministral3ForCausalLM",
    defaults={
        "head_dim": 128,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "rope_parameters": _YARN,
    },
    keys=frozenset({"sliding_window"}),
    windows=same_window,
    has_query_growth=True,
)
