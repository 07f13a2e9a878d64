"""SmolLM3: every fourth layer has no rope."""

from rollout.models.family import ATTENTION_BIAS, MLP_BIAS, Family
from rollout.models.layer_rules import rope_by_flag, windows_without_rope

SMOLLM3 = Family(
    name="smollm3",
    title="SmolLM3",
    architecture="SmolLM3ForCausalLM",
    values=ATTENTION_BIAS | MLP_BIAS,
    defaults={"tie_word_embeddings": True, "rope_theta": 2_000_000.0},
    keys=frozenset(
        {
            *("no_rope_layers", "no_rope_layer_interval"),
            *("use_sliding_window", "sliding_window", "layer_types"),
        }
    ),
    windows=windows_without_rope,
    ropes=rope_by_flag,
)
