"""GEMMA: the Family of Gemma models, listed in `families.registry`. Norms multiply by 1 + weight,
and embeddings are multiplied by sqrt(hidden_size). `gemma2` and `gemma3` import GELU_TANH."""

from rollout.models.family import ATTENTION_BIAS, Family

GELU_TANH = {"gelu_pytorch_tanh": "gelu_tanh"}
GEMMA = Family(
    name="gemma",
    title="Gemma",
    architecture="GemmaForCausalLM",
    values={"norm_offset": 1.0, "norm_rounds_first": False, **ATTENTION_BIAS},
    defaults={"head_dim": 256, "num_key_value_heads": 16, "tie_word_embeddings": True},
    # transformers does not read this key, but other programs do.
    fixed={"hidden_activation": (None, *GELU_TANH)},
    # "gelu" is what the first releases wrote for the tanh approximation.
    activations=GELU_TANH | {"gelu": "gelu_tanh"},
    has_sqrt_embedding=True,
)
