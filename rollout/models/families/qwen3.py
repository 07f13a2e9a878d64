"""Dense Qwen3: query and key heads are normed, and heads need not add up to the hidden size."""

from rollout.models.family import ATTENTION_BIAS, Family
from rollout.models.layer_rules import windows_if_used

QWEN3 = Family(
    name="qwen3",
    title="Qwen3 (dense)",
    architecture="Qwen3ForCausalLM",
    values={"qk_norm": True, **ATTENTION_BIAS},
    defaults={"head_dim": 128},
    keys=frozenset({"use_sliding_window", "sliding_window", "max_window_layers", "layer_types"}),
    windows=windows_if_used,
)
