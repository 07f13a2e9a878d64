"""OLMO2: the Family of OLMo 2, listed in `families.registry`. Norms come only after the mixers.
Queries and keys are normed over all heads together."""

from rollout.models.family import ATTENTION_BIAS, POST_NORM, Family

OLMO2 = Family(
    name="olmo2",
    title="OLMo 2",
    architecture="Olmo2ForCausalLM",
    branches=POST_NORM,
    values={
        "qk_norm": True,
        "qk_norm_whole": True,
        "norm_rounds_first": False,
        "rotary_rounding": "once",
        **ATTENTION_BIAS,
    },
    defaults={"rms_norm_eps": 1e-5},
)
