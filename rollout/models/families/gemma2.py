"""GEMMA2: the Family of Gemma 2, listed in `families.registry`. These models have norms before and
after each mixer, softcaps, and a window on every second layer. `gemma3` imports GEMMA2_VALUES."""

from rollout.models.families.gemma import GELU_TANH
from rollout.models.family import ATTENTION_BIAS, SANDWICH, Family, Key
from rollout.models.layer_rules import windows_by_type


def root_to_scale(scalar: float) -> float:
    """Return the scale of attention scores for a `query_pre_attn_scalar`."""
    return float(scalar**-0.5)


def scale_to_root(scale: float) -> int:
    """Return the `query_pre_attn_scalar` for a scale of attention scores."""
    return round(scale**-2)


GEMMA2_VALUES = {
    "norm_offset": 1.0,
    "norm_rounds_first": False,
    "attention_scale": Key(name="query_pre_attn_scalar", read=root_to_scale, write=scale_to_root),
    "attention_softcap": Key(name="attn_logit_softcapping"),
    "logit_softcap": Key(name="final_logit_softcapping"),
    **ATTENTION_BIAS,
}
GEMMA2 = Family(
    name="gemma2",
    title="Gemma 2",
    architecture="Gemma2ForCausalLM",
    branches=SANDWICH,
    values=GEMMA2_VALUES,
    defaults={
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
        "head_dim": 256,
        "num_key_value_heads": 4,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "tie_word_embeddings": True,
    },
    keys=frozenset({"layer_types"}),
    ignored=frozenset({"hidden_act", "sliding_window_size"}),
    windows=windows_by_type(full_every=2),
    activation_key="hidden_activation",
    activations=GELU_TANH,
    has_sqrt_embedding=True,
)
