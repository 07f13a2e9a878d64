"""Ministral 3 (text): yarn, and queries that grow with the logarithm of their position."""

from rollout.models.family import Family
from rollout.models.layer_rules import same_window

MINISTRAL3 = Family(
    name="ministral3",
    title="Ministral 3 (text)",
    architecture="Ministral3ForCausalLM",
    defaults={"head_dim": 128, "rms_norm_eps": 1e-5},
    keys=frozenset({"sliding_window", "llama_4_scaling_beta"}),
    windows=same_window,
)
