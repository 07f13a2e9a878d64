"""Llama 2, 3, 3.1, 3.2 (text) and everything else saved as `model_type: llama`."""

from rollout.models.family import Family

LLAMA = Family(
    name="llama",
    architecture="LlamaForCausalLM",
    qkv_bias="attention_bias",
    output_bias="attention_bias",
    mlp_bias="mlp_bias",
    qk_norm=False,
    default_head_dim=None,
)
