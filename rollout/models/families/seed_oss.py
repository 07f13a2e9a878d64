"""SEED_OSS: the Family of Seed-OSS, listed in `families.registry`. Query, key and value have a bias
by `attention_bias`, and the output by `attention_out_bias`."""

from rollout.models.family import MLP_BIAS, QKV_BIAS, Family, Key

SEED_OSS = Family(
    name="seed_oss",
    title="Seed-OSS",
    architecture="SeedOssForCausalLM",
    values={**QKV_BIAS, "attention_output_bias": Key(name="attention_out_bias"), **MLP_BIAS},
    defaults={"attention_bias": True, "head_dim": 128, "num_key_value_heads": 8},
)
