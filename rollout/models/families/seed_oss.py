"""SEED_OSS, the Family of Seed-OSS in `registry`: `attention_bias` is for query, key and value,
`attention_out_bias` for the output."""

from rollout.models.family import MLP_BIAS, QKV_BIAS, Family, Key

SEED_OSS = Family(
    name="seed_oss",
    title="Seed-OSS",
    architecture="SeedOssForCausalLM",
    values={**QKV_BIAS, "attention_output_bias": Key(name="attention_out_bias"), **MLP_BIAS},
    defaults={"attention_bias": True, "head_dim": 128, "num_key_value_heads": 8},
)
