"""Dense Qwen2 and Qwen2.5: query, key and value always have a bias."""

from rollout.models.family import Family

QWEN2 = Family(
    name="qwen2",
    architecture="Qwen2ForCausalLM",
    qkv_bias=True,
    output_bias=False,
    mlp_bias=False,
    qk_norm=False,
    default_head_dim=None,
)
