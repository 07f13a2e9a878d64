"""PHI3: the Family of Phi-3, Phi-3.5, Phi-4 and Phi-4-mini, listed in `families.registry`. These
models have fused projections, partial RoPE and LongRoPE."""

from rollout.models.family import Family
from rollout.models.layer_rules import same_window

PHI3 = Family(
    name="phi3",
    title="Phi-3, Phi-3.5, Phi-4, Phi-4-mini",
    architecture="Phi3ForCausalLM",
    defaults={"original_max_position_embeddings": 4096, "rms_norm_eps": 1e-5},
    keys=frozenset({"sliding_window", "partial_rotary_factor"}),
    # Published configs have these keys, always with these values.
    fixed={"full_attn_mod": (1,), "interpolate_factor": (1,)},
    fused=frozenset({"qkv_proj", "gate_up_proj"}),
    windows=same_window,
    rope_kinds=("default", "longrope"),
)
