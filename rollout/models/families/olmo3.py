"""OLMO3: the Family of OLMo 3, listed in `families.registry`. These models are OLMo 2 with one RoPE
per layer type and with sliding windows, by default in three of four layers."""

from rollout.models.family import ATTENTION_BIAS, POST_NORM, Family
from rollout.models.layer_rules import ropes_by_type, windows_by_type

_THETA = 500_000.0  # for layers whose rope parameters give no rope_theta
OLMO3 = Family(
    name="olmo3",
    title="OLMo 3",
    architecture="Olmo3ForCausalLM",
    branches=POST_NORM,
    values={
        "qk_norm": True,
        "qk_norm_whole": True,
        "norm_rounds_first": False,
        "rotary_rounding": "once",
        **ATTENTION_BIAS,
    },
    defaults={"rms_norm_eps": 1e-5, "rope_theta": _THETA, "sliding_window": 4096},
    keys=frozenset({"layer_types"}),
    # transformers uses any other value for full attention alone; older versions used it for all
    # layers. So any other value is refused.
    fixed={"rope_theta": (_THETA,)},
    windows=windows_by_type(full_every=4),
    ropes=ropes_by_type,
)
