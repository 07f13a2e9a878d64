"""Dense Qwen2 and Qwen2.5: query, key and value always have a bias."""

from rollout.models.family import Family
from rollout.models.layer_rules import windows_if_used

QWEN2 = Family(
    name="qwen2",
    title="Qwen2, Qwen2.5 (dense)",
    architecture="Qwen2ForCausalLM",
    values={"attention_bias": True},
    keys=frozenset({"use_sliding_window", "sliding_window", "max_window_layers", "layer_types"}),
    windows=windows_if_used,
)
