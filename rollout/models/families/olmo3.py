"""OLMo 3: as OLMo 2, with a window on three layers of four and a RoPE per layer type."""

from rollout.models.family import ATTENTION_BIAS, POST_NORM, Family
from rollout.models.layer_rules import ropes_by_type, windows_by_type

_THETA = 500_000.0  # of layers whose own rope parameters have none
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
    # transformers gives another one to full attention alone, older versions gave it to all layers.
    fixed={"rope_theta": (_THETA,)},
    windows=windows_by_type(full_every=4),
    ropes=ropes_by_type,
)
