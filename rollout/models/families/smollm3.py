"""SMOLLM3: the Family of SmolLM3, listed in `families.registry`. Some layers, by default every
fourth, have no RoPE."""

from rollout.models.family import ATTENTION_BIAS, MLP_BIAS, Family
from rollout.models.layer_rules import rope_by_flag, windows_without_rope

SMOLLM3 = Family(
    name="smollm3",
    title="SmolLM3",
    architecture="SmolLM3ForCausalLM",
    values=ATTENTION_BIAS | MLP_BIAS,
    defaults={
        "no_rope_layer_interval": 4,
        "num_key_value_heads": 4,
        "rope_theta": 2_000_000.0,
        "tie_word_embeddings": True,
        "use_sliding_window": False,
    },
    keys=frozenset({"no_rope_layers", "sliding_window", "layer_types"}),
    ignored=frozenset({"max_window_layers"}),
    windows=windows_without_rope,
    ropes=rope_by_flag,
)
