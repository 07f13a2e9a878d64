"""Cohere 2 (Command R7B, Command A): one LayerNorm, then attention and MLP side by side; layers
with a window have a rope, the others none.
"""

from rollout.models.family import ATTENTION_BIAS, PARALLEL, Family, Key
from rollout.models.layer_rules import rope_with_window, windows_by_type

COHERE2 = Family(
    name="cohere2",
    title="Command R7B, Command A",
    architecture="Cohere2ForCausalLM",
    branches=PARALLEL,
    values={
        "norm": "layer",
        "rotary_rounding": "angles",
        "rms_norm_eps": Key(name="layer_norm_eps"),
        "logit_multiplier": Key(name="logit_scale"),
        **ATTENTION_BIAS,
    },
    defaults={
        "layer_norm_eps": 1e-5,
        "logit_scale": 0.0625,
        "sliding_window": 4096,
        "tie_word_embeddings": True,
    },
    # All but two stand in published configs for what the models do anyway.
    keys=frozenset(
        {
            *("layer_types", "sliding_window_pattern", "layer_switch", "position_embedding_type"),
            *("order_of_interleaved_layers", "rotary_pct", "use_embedding_sharing"),
            *("use_gated_activation", "use_parallel_block", "use_parallel_embedding"),
        }
    ),
    windows=windows_by_type(full_every=4),
    ropes=rope_with_window,
    has_interleaved_rope=True,
)
