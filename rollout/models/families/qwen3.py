"""QWEN3: the Family of Qwen3 (dense), listed in `families.registry`. Query and key heads are
normed, and `head_dim` is independent of the hidden size."""

from rollout.models.families.qwen2 import QWEN_WINDOWS
from rollout.models.family import ATTENTION_BIAS, Family
from rollout.models.layer_rules import windows_if_used

QWEN3 = Family(
    name="qwen3",
    title="Qwen3 (dense)",
    architecture="Qwen3ForCausalLM",
    values={"qk_norm": True, **ATTENTION_BIAS},
    defaults={"head_dim": 128, "num_key_value_heads": 32, **QWEN_WINDOWS},
    keys=frozenset({"layer_types"}),
    windows=windows_if_used,
)
