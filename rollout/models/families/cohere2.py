"""COHERE2: the Family of Cohere 2 (Command R7B, Command A), listed in `families.registry`.
Attention and MLP run in parallel after one LayerNorm. Only layers with a sliding window have
RoPE."""

from rollout.models.family import ATTENTION_BIAS, PARALLEL, Family, Key
from rollout.models.layer_rules import rope_with_window, windows_by_pattern

COHERE2 = Family(
    name="cohere2",
    title="Command R7B, Command A",
    architecture="Cohere2ForCausalLM",
    branches=PARALLEL,
    values={
        "norm": "layer",
        "rotary_rounding": "angles",
        "logit_multiplier": Key(name="logit_scale"),
        **ATTENTION_BIAS,
    },
    defaults={
        "layer_norm_eps": 1e-5,
        "logit_scale": 0.0625,
        "sliding_window": 4096,
        "sliding_window_pattern": 4,
        "tie_word_embeddings": True,
    },
    keys=frozenset({"layer_types"}),
    # Published configs have these keys, always with these values.
    fixed={
        "order_of_interleaved_layers": ("local_attn_first",),
        "position_embedding_type": ("rope_gptj",),
        "rotary_pct": (1.0,),
        "use_embedding_sharing": (True,),
        "use_gated_activation": (True,),
        "use_parallel_block": (True,),
    },
    ignored=frozenset({"layer_switch", "use_parallel_embedding"}),
    windows=windows_by_pattern,
    norm_eps_key="layer_norm_eps",
    ropes=rope_with_window,
    has_interleaved_rope=True,
)
