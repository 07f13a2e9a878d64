"""Dense Qwen3: query and key heads are normed, and heads need not add up to the hidden size."""

from rollout.models.family import Family

QWEN3 = Family(
    name="qwen3",
    architecture="Qwen3ForCausalLM",
    qkv_bias="attention_bias",
    output_bias="attention_bias",
    mlp_bias=False,
    qk_norm=True,
    default_head_dim=128,
)
