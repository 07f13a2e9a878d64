"""MINISTRAL: the Family of Ministral 8B, listed in `families.registry`. `layer_types` says which
layers have a sliding window."""

from rollout.models.family import Family
from rollout.models.layer_rules import windows_by_type

MINISTRAL = Family(
    name="ministral",
    title="Ministral 8B",
    architecture="MinistralForCausalLM",
    defaults={"num_key_value_heads": 8, "sliding_window": 4096},
    keys=frozenset({"layer_types"}),
    windows=windows_by_type(),
)
