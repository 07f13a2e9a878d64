"""GEMMA3: the Family of Gemma 3 (text), listed in `families.registry`. These models differ from
Gemma 2 by normed query and key heads, a RoPE per layer type, and no attention softcap."""

from rollout.models.families.gemma import GELU_TANH
from rollout.models.families.gemma2 import GEMMA2_VALUES
from rollout.models.family import SANDWICH, Family
from rollout.models.layer_rules import ropes_by_type, windows_by_pattern

GEMMA3 = Family(
    name="gemma3_text",
    title="Gemma 3 (text)",
    architecture="Gemma3ForCausalLM",
    branches=SANDWICH,
    # transformers reads attn_logit_softcapping and does not apply it.
    values={name: rule for name, rule in GEMMA2_VALUES.items() if name != "attention_softcap"}
    | {"qk_norm": True},
    defaults={
        "head_dim": 256,
        "num_key_value_heads": 4,
        "query_pre_attn_scalar": 256,
        "rope_theta": 1_000_000.0,
        "rope_local_base_freq": 10_000.0,
        "sliding_window": 4096,
        "sliding_window_pattern": 6,
        "tie_word_embeddings": True,
    },
    keys=frozenset({"layer_types"}),
    windows=windows_by_pattern,
    ropes=ropes_by_type,
    activation_key="hidden_activation",
    activations=GELU_TANH,
    has_sqrt_embedding=True,
)
