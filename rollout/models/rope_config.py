"""RopeSpec from and to the keys of a Hugging Face config, in the notation of both v4 and v5."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from rollout.errors import ModelError
from rollout.layers.rope import ROPE_KINDS, RopeSpec, yarn_scale

DEFAULT_THETA = 10_000.0
FULL, SLIDING = "full_attention", "sliding_attention"  # names of layer types
_ORIGINAL = "original_max_position_embeddings"
_KNOWN = frozenset(
    {
        *("rope_type", "type", "rope_theta", "factor", _ORIGINAL, "max_position_embeddings"),
        *("low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow", "truncate", "mscale"),
        *("mscale_all_dim", "attention_factor", "short_factor", "long_factor"),
        *("partial_rotary_factor", "llama_4_scaling_beta"),
    }
)


def rope_from_hf(config: Mapping[str, Any], layer_type: str | None = None) -> RopeSpec:
    """Read `rope_parameters` (transformers v5), or `rope_theta` with `rope_scaling` (v4), which
    wins where both are set.

    `layer_type` names the layers in a config with ropes per type. In v4's notation these are scaled
    in full attention alone, and `rope_local_base_freq` is the theta of sliding attention. Raises
    ModelError for a type, or a way of using it, that is not supported.
    """
    parameters, theta = _parameters(config, layer_type)
    if layer_type is not None and not parameters.get("truncate", True):
        raise ModelError(
            f"truncate=False in the rope parameters of {layer_type} is not supported: transformers "
            "ignores it there; remove it"
        )
    if unknown := sorted(key for key in parameters.keys() - _KNOWN if parameters[key]):
        name, value = unknown[0], parameters[unknown[0]]
        raise ModelError(f"rope parameter {name}={value!r} is not supported")
    if parameters.get("rope_theta"):
        theta = _number(parameters, "rope_theta")
    common = _common(parameters, config, float(theta))
    kind = common["kind"]
    if kind == "linear":
        return RopeSpec(**common, factor=_number(parameters, "factor"))
    if kind == "llama3":
        return RopeSpec(
            **common,
            factor=_number(parameters, "factor"),
            low_freq_factor=_number(parameters, "low_freq_factor"),
            high_freq_factor=_number(parameters, "high_freq_factor"),
        )
    if kind == "yarn":
        return RopeSpec(
            **common,
            factor=_number(parameters, "factor"),
            beta_fast=float(parameters.get("beta_fast") or 32.0),
            beta_slow=float(parameters.get("beta_slow") or 1.0),
            truncate=bool(parameters.get("truncate", True)),
            attention_factor=_yarn_attention_factor(parameters),
        )
    if kind == "longrope":
        return _longrope(common, parameters, config)
    return RopeSpec(**common)


def rope_to_hf(rope: RopeSpec) -> dict[str, Any]:
    """The config keys of `rope` in v4's notation, which both versions read."""
    # Where nothing is said of scaling or of partial ropes, some families have one.
    scaling = rope_parameters(rope)
    keys: dict[str, Any] = {"rope_theta": scaling.pop("rope_theta"), "rope_scaling": scaling}
    keys["partial_rotary_factor"] = rope.partial
    if rope.kind == "longrope":
        keys[_ORIGINAL] = rope.original_max_positions  # which its family reads here alone
    return keys


def rope_parameters(rope: RopeSpec) -> dict[str, Any]:
    """The parameters of one rope in v5's notation."""
    parameters: dict[str, Any] = {"rope_type": rope.kind, "rope_theta": rope.theta}
    if rope.original_max_positions:
        parameters[_ORIGINAL] = rope.original_max_positions
    if rope.kind != "default":
        parameters["factor"] = rope.factor
    if rope.kind == "llama3":
        parameters["low_freq_factor"] = rope.low_freq_factor
        parameters["high_freq_factor"] = rope.high_freq_factor
    if rope.kind == "yarn":
        parameters["beta_fast"] = rope.beta_fast
        parameters["beta_slow"] = rope.beta_slow
        parameters["truncate"] = rope.truncate
    if rope.kind == "longrope":
        parameters["short_factor"] = list(rope.short_factors)
        parameters["long_factor"] = list(rope.long_factors)
    if rope.kind in ("yarn", "longrope"):
        parameters["attention_factor"] = rope.attention_factor
    if rope.mscale_all_dim:
        parameters["mscale_all_dim"] = rope.mscale_all_dim
    if rope.query_growth:
        parameters["llama_4_scaling_beta"] = rope.query_growth
    return parameters


def _parameters(
    config: Mapping[str, Any], layer_type: str | None
) -> tuple[Mapping[str, Any], float]:
    """(parameters of layers of this type, theta where they have none).

    As in transformers, `rope_scaling` takes the place of `rope_parameters` as a whole; only where
    these are per layer type, it is added to those of full attention.
    """
    theta = _number(config, "rope_theta") if config.get("rope_theta") else DEFAULT_THETA
    given, scaling = _mapping(config, "rope_parameters"), _mapping(config, "rope_scaling")
    is_nested = any(isinstance(value, Mapping) for value in given.values())
    if layer_type is None:
        parameters = scaling or given
        if any(isinstance(value, Mapping) for value in parameters.values()):
            raise ModelError(
                f"rope parameters per layer type ({sorted(parameters)}) are not supported in this "
                "family; its layers share one set"
            )
        return parameters, theta
    if given and not is_nested:
        raise ModelError(
            f"rope_parameters={dict(given)} must be per layer type, {FULL!r} and {SLIDING!r}, in "
            "this family"
        )
    own = _mapping(given, layer_type)
    if layer_type == SLIDING:
        return own, config.get("rope_local_base_freq") or theta
    return {**own, **scaling}, theta


def _mapping(config: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """The object at `key`, which is empty where nothing is said. Raises ModelError."""
    value = config.get(key)
    if value is not None and not isinstance(value, Mapping):
        raise ModelError(f"{key}={value!r} in the config must be an object")
    return value or {}


def _common(
    parameters: Mapping[str, Any], config: Mapping[str, Any], theta: float
) -> dict[str, Any]:
    """Fields of RopeSpec that every kind may have."""
    kind = _kind(parameters)
    partial = parameters.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    if partial is None and config.get("rotary_dim"):
        partial = config["rotary_dim"] / config["head_dim"]
    common = {
        "theta": theta,
        "kind": kind,
        "partial": 1.0 if partial is None else float(partial),
        "query_growth": float(parameters.get("llama_4_scaling_beta") or 0.0),
    }
    if kind != "default":
        common["mscale_all_dim"] = float(parameters.get("mscale_all_dim") or 0.0)
    if common["query_growth"] or kind in ("llama3", "yarn", "longrope"):
        common["original_max_positions"] = _original_max_positions(parameters, config)
    return common


def _kind(parameters: Mapping[str, Any]) -> str:
    """The rope's type: `rope_type`, or `type`, its older name. Raises ModelError if either is not
    known, though transformers reads the second only where the first is absent.
    """
    names = [parameters[key] for key in ("rope_type", "type") if key in parameters]
    kinds = ["longrope" if name == "su" else name for name in names]  # its first name
    for kind in kinds:
        if kind not in ROPE_KINDS:
            raise ModelError(f"rope type {kind!r} is not supported; supported: {ROPE_KINDS}")
    return kinds[0] if kinds else "default"


def _longrope(
    common: dict[str, Any], parameters: Mapping[str, Any], config: Mapping[str, Any]
) -> RopeSpec:
    """Factors of each frequency. LongRoPE, sec. 3.3; the attention factor is that of its code."""
    original = common["original_max_positions"]
    factor = parameters.get("factor") or config["max_position_embeddings"] / original
    attention_factor = parameters.get("attention_factor")
    if attention_factor is None:
        growth = math.log(max(factor, 1.0)) / math.log(original)
        attention_factor = math.sqrt(1 + growth)
    return RopeSpec(
        **common,
        factor=float(factor),
        attention_factor=float(attention_factor),
        short_factors=_numbers(parameters, "short_factor"),
        long_factors=_numbers(parameters, "long_factor"),
    )


def _numbers(parameters: Mapping[str, Any], key: str) -> tuple[float, ...]:
    values = parameters.get(key)
    if not isinstance(values, list | tuple):
        raise ModelError(f"rope parameter {key}={values!r} must list numbers")
    return tuple(map(float, values))


def _number(parameters: Mapping[str, Any], key: str) -> float:
    value = parameters.get(key)
    if not isinstance(value, int | float):
        raise ModelError(f"rope parameter {key}={value!r} must be a number; got {dict(parameters)}")
    return float(value)


def _original_max_positions(parameters: Mapping[str, Any], config: Mapping[str, Any]) -> int:
    """The context before it was stretched; the model's whole context where nothing is said."""
    given = config.get(_ORIGINAL) or parameters.get(_ORIGINAL)
    return int(given or config["max_position_embeddings"])


def _yarn_attention_factor(parameters: Mapping[str, Any]) -> float:
    """As given, or 0.1 ln(factor) + 1 (YaRN, sec. 3.4), or DeepSeek's ratio of two of these."""
    if parameters.get("attention_factor") is not None:
        return _number(parameters, "attention_factor")
    factor = _number(parameters, "factor")
    above, below = parameters.get("mscale"), parameters.get("mscale_all_dim")
    if above and below:
        return yarn_scale(factor, above) / yarn_scale(factor, below)
    return yarn_scale(factor, 1.0)
