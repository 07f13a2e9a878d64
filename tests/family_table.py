"""The table of families in docs/models.md: `python -m tests.family_table` prints it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import transformers

from rollout.models import ModelSpec
from rollout.models.families.registry import FAMILIES
from rollout.models.family import PARALLEL, POST_NORM, PRE_NORM, Family, Mixture
from tests.family_cases import FAMILY_CASES
from tests.tiny_models import tiny_config

PAGE = Path(__file__).parents[1] / "docs" / "models.md"
HEAD = (
    "| `model_type` | models | layer | attention | rope | experts | besides |\n"
    "|---|---|---|---|---|---|---|\n"
)
_CHOICES = {
    "softmax": "softmax, then top k",
    "softmax_chosen": "top k, then softmax",
    "sigmoid": "sigmoid, then top k",
}
_ACTIVATIONS = {"gelu_tanh": "GELU", "clamped_swiglu": "clamped SwiGLU"}
_PLACES = {
    PRE_NORM: "norm before",
    POST_NORM: "norm after",
    PARALLEL: "norm before both, in parallel",
}


def family_table() -> str:
    """One row for each family, from its values and the config that is tested."""
    return HEAD + "".join(_row(family) for family in FAMILIES.values())


def _row(family: Family) -> str:
    config = tiny_config(family.name, **FAMILY_CASES[family.name])
    spec = ModelSpec.from_hf_config(config.to_dict())
    layer = _PLACES.get(family.branches, "norm before and after")
    columns = (
        *(_attention(spec), _rope(spec), _experts(spec, family.mixture)),
        _besides(spec, family),
    )
    parts = (layer, *map(", ".join, columns))
    return f"| `{family.name}` | {family.title} | {' | '.join(parts)} |\n"


def _attention(spec: ModelSpec) -> Iterator[str]:
    if spec.latent is not None:
        yield "latent (MLA)"
    if spec.windows:
        yield "window on some layers" if None in spec.windows else "window"
    if spec.qk_norm:
        yield "query and key normed" + (" as a whole" if spec.qk_norm_whole else "")
    if spec.attention_scale is not None:
        yield "scale"
    if spec.attention_softcap is not None:
        yield "softcap"
    if spec.attention_bias:
        yield "bias"
    if spec.attention_sinks:
        yield "sinks"


def _rope(spec: ModelSpec) -> Iterator[str]:
    if spec.ropes:
        yield "none on some layers" if None in spec.ropes else "one per layer type"
    if spec.rope.partial != 1.0:
        yield "partial"
    if spec.rope.is_interleaved:
        yield "interleaved"
    if spec.rope.query_growth:
        yield "queries grow with ln(position)"
    if spec.rope.kind == "longrope":
        yield "longrope"


def _experts(spec: ModelSpec, mixture: Mixture | None) -> Iterator[str]:
    if mixture is None:
        return
    yield _CHOICES[mixture.scores]
    if spec.router_normalizes:
        yield "weights sum to 1"
    if spec.router_scale != 1.0:
        yield "scale"
    if mixture.has_correction:
        yield "correction"
    if spec.num_expert_groups > 1:
        yield "groups"
    if mixture.has_bias:
        yield "biases"
    if spec.num_shared_experts:
        yield "shared expert" + (" with a gate" if mixture.names.shared_gate else "")
    if spec.num_moe_layers < spec.num_layers:
        yield "MLP on some layers"


def _besides(spec: ModelSpec, family: Family) -> Iterator[str]:
    if spec.norm != "rms":
        yield "LayerNorm"
    if spec.norm_offset:
        yield "norm weights + 1"
    if spec.activation in _ACTIVATIONS:
        yield _ACTIVATIONS[spec.activation]
    names = ("embedding", "residual", "logit")
    scaled = [name for name in names if getattr(spec, f"{name}_multiplier") != 1.0]
    if scaled:
        yield f"multiplier of {', '.join(scaled)}"
    if spec.logit_softcap is not None:
        yield "softcap of logits"
    if family.fused:
        yield f"fused {', '.join(f'`{name}`' for name in sorted(family.fused))}"


if __name__ == "__main__":
    transformers.logging.set_verbosity_error()
    print(family_table(), end="")
