"""Phi-3, Phi-3.5, Phi-4, Phi-4-mini: fused projections, partial rope, longrope."""

from rollout.models.family import Family
from rollout.models.layer_rules import same_window

PHI3 = Family(
    name="phi3",
    title="Phi-3, Phi-3.5, Phi-4, Phi-4-mini",
    architecture="Phi3ForCausalLM",
    defaults={"rms_norm_eps": 1e-5},
    # The last two stand in published configs for what the models do anyway.
    keys=frozenset(
        {"sliding_window", "partial_rotary_factor", "full_attn_mod", "interpolate_factor"}
    ),
    fused=frozenset({"qkv_proj", "gate_up_proj"}),
    windows=same_window,
)
