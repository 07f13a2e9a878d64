"""MISTRAL: the Family of Mistral 7B, Nemo and Small, listed in `families.registry`. Every layer has
the window of the config, if there is one."""

from rollout.models.family import Family
from rollout.models.layer_rules import same_window

MISTRAL = Family(
    name="mistral",
    title="Mistral 7B, Nemo, Small 2409-2501",
    architecture="MistralForCausalLM",
    defaults={"num_key_value_heads": 8, "sliding_window": 4096},
    windows=same_window,
)
