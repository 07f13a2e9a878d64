"""RopeSpec from and to the keys of a Hugging Face config, in the notation of both v4 and v5."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from rollout.errors import ModelError
from rollout.layers.rope import RopeSpec

DEFAULT_THETA = 10_000.0


def rope_from_hf(config: Mapping[str, Any]) -> RopeSpec:
    """Read `rope_parameters` (transformers v5), or `rope_theta` with `rope_scaling` (v4).

    Raises ModelError for a type, or a way of using it, that is not supported.
    """
    parameters = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if any(isinstance(value, Mapping) for value in parameters.values()):
        raise ModelError(
            f"rope parameters per layer type ({sorted(parameters)}) are not supported; "
            "all layers must share one set"
        )
    partial = parameters.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    if partial not in (None, 1.0):
        raise ModelError(f"partial_rotary_factor={partial} is not supported; only 1.0 is")

    kind = parameters.get("rope_type", parameters.get("type", "default"))
    theta = float(parameters.get("rope_theta") or config.get("rope_theta") or DEFAULT_THETA)
    if kind == "linear":
        return RopeSpec(theta=theta, kind=kind, factor=_number(parameters, "factor"))
    if kind == "llama3":
        return RopeSpec(
            theta=theta,
            kind=kind,
            factor=_number(parameters, "factor"),
            original_max_positions=_original_max_positions(parameters, config),
            low_freq_factor=_number(parameters, "low_freq_factor"),
            high_freq_factor=_number(parameters, "high_freq_factor"),
        )
    if kind == "yarn":
        return RopeSpec(
            theta=theta,
            kind=kind,
            factor=_number(parameters, "factor"),
            original_max_positions=_original_max_positions(parameters, config),
            beta_fast=float(parameters.get("beta_fast") or 32.0),
            beta_slow=float(parameters.get("beta_slow") or 1.0),
            truncate=bool(parameters.get("truncate", True)),
            attention_factor=_yarn_attention_factor(parameters),
        )
    return RopeSpec(theta=theta, kind=kind)


def rope_to_hf(rope: RopeSpec) -> dict[str, Any]:
    """The config keys of `rope` in v4's notation, which both versions read."""
    keys: dict[str, Any] = {"rope_theta": rope.theta, "rope_scaling": None}
    if rope.kind == "default":
        return keys
    scaling: dict[str, Any] = {"rope_type": rope.kind, "factor": rope.factor}
    if rope.kind != "linear":
        scaling["original_max_position_embeddings"] = rope.original_max_positions
    if rope.kind == "llama3":
        scaling["low_freq_factor"] = rope.low_freq_factor
        scaling["high_freq_factor"] = rope.high_freq_factor
    if rope.kind == "yarn":
        scaling["beta_fast"] = rope.beta_fast
        scaling["beta_slow"] = rope.beta_slow
        scaling["truncate"] = rope.truncate
        scaling["attention_factor"] = rope.attention_factor
    return keys | {"rope_scaling": scaling}


def _number(parameters: Mapping[str, Any], key: str) -> float:
    value = parameters.get(key)
    if not isinstance(value, int | float):
        raise ModelError(f"rope parameter {key}={value!r} must be a number; got {dict(parameters)}")
    return float(value)


def _original_max_positions(parameters: Mapping[str, Any], config: Mapping[str, Any]) -> int:
    """The context before it was stretched; the model's whole context where nothing is said."""
    key = "original_max_position_embeddings"
    return int(config.get(key) or parameters.get(key) or config["max_position_embeddings"])


def _yarn_attention_factor(parameters: Mapping[str, Any]) -> float:
    """As given, or 0.1 ln(factor) + 1 (YaRN, sec. 3.4), or DeepSeek's ratio of two of these."""
    if parameters.get("attention_factor") is not None:
        return _number(parameters, "attention_factor")
    factor = _number(parameters, "factor")

    def scale(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    above, below = parameters.get("mscale"), parameters.get("mscale_all_dim")
    return scale(above) / scale(below) if above and below else scale(1.0)
