"""Gemma: weights of norms count from 1, embeddings are scaled by the root of their size."""

from rollout.models.family import ATTENTION_BIAS, Family

# "gelu" is what the first releases wrote for the tanh approximation.
GEMMA_ACTIVATIONS = {"gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu_tanh"}
GEMMA = Family(
    name="gemma",
    title="Gemma",
    architecture="GemmaForCausalLM",
    values={"norm_offset": 1.0, "norm_rounds_first": False, **ATTENTION_BIAS},
    defaults={"head_dim": 256, "tie_word_embeddings": True},
    keys=frozenset({"hidden_activation"}),
    activations=GEMMA_ACTIVATIONS,
    has_sqrt_embedding=True,
)
