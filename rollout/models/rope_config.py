"""Conversion of RopeSpec from and to the config keys of Hugging Face transformers v4 and v5.

Used by `rollout.models.spec`, `rollout.models.layer_rules` and the family `qwen2_moe`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from rollout.errors import ModelError
from rollout.layers.rope import ROPE_KINDS, RopeSpec, yarn_scale
from rollout.models.config_values import is_integer, is_number

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
    """Return the RopeSpec of a config: from `rope_parameters` (transformers v5), or from
    `rope_theta` and `rope_scaling` (v4).

    `layer_type` is FULL or SLIDING in a family with one rope per layer type, else None. With ropes
    per type, `rope_scaling` scales FULL only, and `rope_local_base_freq` is the theta of SLIDING.
    Raises ModelError for a rope type or a parameter that is not supported.
    """
    if layer_type is None:
        parameters, theta = _shared_parameters(config), config.get("rope_theta", DEFAULT_THETA)
    else:
        parameters, theta = _parameters_of_type(config, layer_type)
    if unknown := sorted(parameters.keys() - _KNOWN):
        name, value = unknown[0], parameters[unknown[0]]
        raise ModelError(f"rope parameter {name}={value!r} is not supported")
    common = _common(parameters, config, theta)
    truncate = parameters.get("truncate", True)
    if not isinstance(truncate, bool):
        raise ModelError(f"rope parameter truncate={truncate!r} must be true or false")
    if layer_type is not None:
        _refuse_ignored(parameters, layer_type)
    if common["kind"] == "linear":
        return RopeSpec(**common, factor=_number(parameters, "factor"))
    if common["kind"] == "llama3":
        return RopeSpec(
            **common,
            factor=_number(parameters, "factor"),
            low_freq_factor=_number(parameters, "low_freq_factor"),
            high_freq_factor=_number(parameters, "high_freq_factor"),
        )
    if common["kind"] == "yarn":
        return RopeSpec(
            **common,
            factor=_number(parameters, "factor"),
            beta_fast=_number_or(parameters, "beta_fast") or 32.0,
            beta_slow=_number_or(parameters, "beta_slow") or 1.0,
            truncate=truncate,
            attention_factor=_yarn_attention_factor(parameters),
        )
    if common["kind"] == "longrope":
        return _longrope(common, parameters, config)
    return RopeSpec(**common)


def rope_to_hf(rope: RopeSpec) -> dict[str, Any]:
    """Return the config keys of `rope` as v4 writes them, which v4 and v5 read."""
    # All keys are written: some families have scaling or a partial rope by default.
    scaling = rope_parameters(rope)
    keys: dict[str, Any] = {"rope_theta": scaling.pop("rope_theta"), "rope_scaling": scaling}
    keys["partial_rotary_factor"] = rope.partial
    if rope.kind == "longrope":
        keys[_ORIGINAL] = rope.original_max_positions  # the only key that transformers' Phi-3 reads
    return keys


def rope_parameters(rope: RopeSpec) -> dict[str, Any]:
    """Return the parameters of one rope as v5 writes them."""
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


def _shared_parameters(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the rope parameters that all layers share. Raises ModelError for parameters per layer
    type."""
    # As in transformers, rope_scaling replaces rope_parameters as a whole.
    parameters: Mapping[str, Any] = config.get("rope_scaling") or config.get("rope_parameters", {})
    if any(isinstance(value, Mapping) for value in parameters.values()):
        raise ModelError(
            f"rope parameters per layer type ({sorted(parameters)}) are not supported in this "
            "family; its layers share one set"
        )
    return parameters


def _parameters_of_type(
    config: Mapping[str, Any], layer_type: str
) -> tuple[Mapping[str, Any], float]:
    """Return the parameters of `layer_type`, and the theta to use if they have no `rope_theta`. As
    in transformers, `rope_scaling` is added to the parameters of FULL. A type without parameters
    has `rope_type` "default". Raises ModelError if `rope_parameters` are not per layer type."""
    given = config.get("rope_parameters", {})
    if any(key not in (FULL, SLIDING) for key in given):
        raise ModelError(
            f"rope_parameters={dict(given)} must be per layer type, {FULL!r} and {SLIDING!r}, in "
            "this family"
        )
    own = given.get(layer_type)
    if own is not None and not isinstance(own, Mapping):
        raise ModelError(f"{layer_type}={own!r} in rope_parameters must be an object")
    own = dict(own or {"rope_type": "default"})
    if layer_type == SLIDING:
        return own, config.get("rope_local_base_freq", config["rope_theta"])
    own |= config.get("rope_scaling", {})
    return own, config["rope_theta"]


def _common(
    parameters: Mapping[str, Any], config: Mapping[str, Any], theta: float
) -> dict[str, Any]:
    """Return the fields of RopeSpec that do not depend on the kind of rope."""
    kind = _kind(parameters)
    common = {
        "theta": _number(parameters, "rope_theta") if "rope_theta" in parameters else float(theta),
        "kind": kind,
        "partial": _partial(parameters, config),
        "query_growth": _number_or(parameters, "llama_4_scaling_beta", 0.0),
    }
    if kind != "default":
        common["mscale_all_dim"] = _number_or(parameters, "mscale_all_dim") or 0.0
    if common["query_growth"] or kind in ("llama3", "yarn", "longrope"):
        common["original_max_positions"] = _original_max_positions(parameters, config)
    return common


def _partial(parameters: Mapping[str, Any], config: Mapping[str, Any]) -> float:
    """Return the fraction of each head's dims that rotate."""
    if "partial_rotary_factor" in parameters:
        return _number(parameters, "partial_rotary_factor")
    if "partial_rotary_factor" in config:
        return float(config["partial_rotary_factor"])
    if "rotary_dim" in config:
        head_dim = config["head_dim"] or config["hidden_size"] // config["num_attention_heads"]
        return float(config["rotary_dim"] / head_dim)
    return 1.0


def _kind(parameters: Mapping[str, Any]) -> str:
    """Return the rope's type: `rope_type`, else the older key `type`, else "default". Raises
    ModelError if one of them is unknown."""
    names = [parameters[key] for key in ("rope_type", "type") if key in parameters]
    kinds = ["longrope" if name == "su" else name for name in names]  # "su" is its former name
    for kind in kinds:
        if kind not in ROPE_KINDS:
            raise ModelError(f"rope type {kind!r} is not supported; supported: {ROPE_KINDS}")
    return kinds[0] if kinds else "default"


def _refuse_ignored(parameters: Mapping[str, Any], layer_type: str) -> None:
    """Raise ModelError for parameters that transformers ignores in ropes per layer type."""
    if not parameters.get("truncate", True):
        raise ModelError(
            f"truncate=False in the rope parameters of {layer_type} is not supported: transformers "
            "ignores it there; remove it"
        )
    if {"rope_type", "type"} <= parameters.keys() and parameters["type"] != parameters["rope_type"]:
        raise ModelError(
            f"type={parameters['type']!r} in the rope parameters of {layer_type} is not supported: "
            f"transformers ignores it beside rope_type={parameters['rope_type']!r}; keep rope_type"
        )


def _longrope(
    common: dict[str, Any], parameters: Mapping[str, Any], config: Mapping[str, Any]
) -> RopeSpec:
    """Return a LongRoPE, which has a factor for each frequency. Sources: LongRoPE, sec. 3.3, and
    its published code for the attention factor."""
    original = common["original_max_positions"]
    factor = _number_or(parameters, "factor", config["max_position_embeddings"] / original)
    attention_factor = _number_or(parameters, "attention_factor")
    if attention_factor is None:
        growth = math.log(factor) / math.log(original) if factor > 1 < original else 0.0
        attention_factor = math.sqrt(1 + growth)
    return RopeSpec(
        **common,
        factor=factor,
        attention_factor=attention_factor,
        short_factors=_numbers(parameters, "short_factor"),
        long_factors=_numbers(parameters, "long_factor"),
    )


def _numbers(parameters: Mapping[str, Any], key: str) -> tuple[float, ...]:
    values = parameters.get(key)
    if not isinstance(values, list | tuple) or not all(map(is_number, values)):
        raise ModelError(f"rope parameter {key}={values!r} must list numbers")
    return tuple(map(float, values))


def _number(parameters: Mapping[str, Any], key: str) -> float:
    value = parameters.get(key)
    if not is_number(value):
        raise ModelError(f"rope parameter {key}={value!r} must be a number; got {dict(parameters)}")
    return float(value)


def _number_or(parameters: Mapping[str, Any], key: str, default: Any = None) -> Any:
    """Return the parameter as `_number` does; `default` if it is absent or null."""
    return default if parameters.get(key) is None else _number(parameters, key)


def _original_max_positions(parameters: Mapping[str, Any], config: Mapping[str, Any]) -> int:
    """Return the context length before RoPE scaling. The default is max_position_embeddings."""
    given = config.get(_ORIGINAL, parameters.get(_ORIGINAL, config["max_position_embeddings"]))
    if not is_integer(given, 1):
        raise ModelError(f"rope parameter {_ORIGINAL}={given!r} must be a positive integer")
    return given


def _yarn_attention_factor(parameters: Mapping[str, Any]) -> float:
    """Return the factor of YaRN's cosines and sines. Source: YaRN, sec. 3.4. A given
    `attention_factor` is returned. Given `mscale` and `mscale_all_dim` (DeepSeek), the result is
    the ratio of their YaRN scales. Otherwise it is 0.1 ln(factor) + 1."""
    given = _number_or(parameters, "attention_factor")
    if given is not None:
        return float(given)
    factor = _number(parameters, "factor")
    above, below = _number_or(parameters, "mscale"), _number_or(parameters, "mscale_all_dim")
    if above and below:
        return yarn_scale(factor, above) / yarn_scale(factor, below)
    return yarn_scale(factor, 1.0)
