"""GLM4: the Family of GLM-4 0414, listed in `families.registry`. These models have norms before and
after each mixer, and interleaved RoPE on half of each head."""

from rollout.models.family import QKV_BIAS, BranchNames, Family

_BRANCHES = (
    BranchNames(
        mixer="self_attn", norm_before="input_layernorm", norm_after="post_self_attn_layernorm"
    ),
    BranchNames(
        mixer="mlp", norm_before="post_attention_layernorm", norm_after="post_mlp_layernorm"
    ),
)
GLM4 = Family(
    name="glm4",
    title="GLM-4 0414, GLM-Z1",
    architecture="Glm4ForCausalLM",
    branches=_BRANCHES,
    values=QKV_BIAS,
    defaults={
        "attention_bias": True,
        "head_dim": 128,
        "num_key_value_heads": 2,
        "partial_rotary_factor": 0.5,
        "rms_norm_eps": 1.5625e-07,
    },
    fused=frozenset({"gate_up_proj"}),
    has_interleaved_rope=True,
)
