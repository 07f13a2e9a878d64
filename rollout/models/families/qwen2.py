"""QWEN2: the Family of Qwen2 and Qwen2.5 (dense), listed in `families.registry`. Query, key and
value always have a bias. `qwen3` and `qwen2_moe` import QWEN_WINDOWS."""

from rollout.models.family import Family
from rollout.models.layer_rules import windows_if_used

QWEN_WINDOWS = {"max_window_layers": 28, "sliding_window": 4096, "use_sliding_window": False}
QWEN2 = Family(
    name="qwen2",
    title="Qwen2, Qwen2.5 (dense)",
    architecture="Qwen2ForCausalLM",
    values={"attention_bias": True},
    defaults={"num_key_value_heads": 32, **QWEN_WINDOWS},
    keys=frozenset({"layer_types"}),
    windows=windows_if_used,
)
