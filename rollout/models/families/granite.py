"""GRANITE: the Family of Granite 3 (dense), listed in `families.registry`. These models multiply
embeddings, residual branches, attention scores and logits by constants."""

from rollout.models.family import ATTENTION_BIAS, MLP_BIAS, Family, Key


def _reciprocal(value: float) -> float:
    return 1.0 / value


GRANITE = Family(
    name="granite",
    title="Granite 3 (dense)",
    architecture="GraniteForCausalLM",
    values={
        "embedding_multiplier": Key(name="embedding_multiplier"),
        "residual_multiplier": Key(name="residual_multiplier"),
        "attention_scale": Key(name="attention_multiplier"),
        "logit_multiplier": Key(name="logits_scaling", read=_reciprocal, write=_reciprocal),
        **ATTENTION_BIAS,
        **MLP_BIAS,
    },
    defaults={"attention_multiplier": 1.0},
)
