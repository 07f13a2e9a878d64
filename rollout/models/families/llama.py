"""Llama 2, 3, 3.1, 3.2 (text) and everything else saved as `model_type: llama`."""

from rollout.models.family import ATTENTION_BIAS, MLP_BIAS, Family

LLAMA = Family(
    name="llama",
    title="Llama 2, 3, 3.1, 3.2 (text)",
    architecture="LlamaForCausalLM",
    values=ATTENTION_BIAS | MLP_BIAS,
)
