"""LLAMA: the Family of Llama 2, 3, 3.1 and 3.2 (text), listed in `families.registry`. These models
are the common decoder with optional biases. Other models saved as `model_type: llama` use it,
too."""

from rollout.models.family import ATTENTION_BIAS, MLP_BIAS, Family

LLAMA = Family(
    name="llama",
    title="Llama 2, 3, 3.1, 3.2 (text)",
    architecture="LlamaForCausalLM",
    values=ATTENTION_BIAS | MLP_BIAS,
)
