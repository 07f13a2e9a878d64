"""Check of `quantization_config`: only fp8 and mxfp4 checkpoints can be read.

Used by `config_keys`, `checkpoints.loading` and `checkpoints.dequantized` of `rollout.models`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rollout.errors import ModelError

FP8, MXFP4 = "fp8", "mxfp4"
FP8_BLOCK = 128  # rows and columns that share a scale

_REMEDY = (
    "save the model dequantised (plain bfloat16 tensors, no quantization_config) and load that"
)
# The known keys of each method, with or without effect here: the tensors show which modules are
# quantised, and they are dequantised in any case.
_KNOWN = {
    FP8: frozenset(
        {
            *("quant_method", "weight_block_size", "activation_scheme", "fmt", "scale_fmt"),
            *("modules_to_not_convert", "ignored_layers", "modules_to_convert", "dequantize"),
            "expert_dtype",
        }
    ),
    MXFP4: frozenset({"quant_method", "modules_to_not_convert", "dequantize"}),
}
_LEGAL: Mapping[str, tuple[Any, ...]] = {
    # Dynamic activation scales only matter to 8-bit products; static ones are part of the model.
    "activation_scheme": ("dynamic", None),
    "fmt": ("e4m3", "float8_e4m3fn", None),
    "scale_fmt": ("float", "ue8m0", None),
    "expert_dtype": ("fp8", None),
}


def quant_method_of(config: Mapping[str, Any]) -> str | None:
    """Return the quantization method of a config.json: FP8, MXFP4, or None without quantization.
    Raises ModelError for a method or a setting that is not supported."""
    quantization = config.get("quantization_config")
    if quantization is None:
        return None
    if not isinstance(quantization, Mapping):
        raise ModelError(f"quantization_config={quantization!r} must be an object; {_REMEDY}")
    given = quantization.get("quant_method")
    method = str(getattr(given, "value", given))  # transformers has an enum for it
    if method not in _KNOWN:
        raise ModelError(
            f"quantization_config: quant_method={method!r} is not supported, only "
            f"{FP8!r} and {MXFP4!r} are; {_REMEDY}"
        )
    for key, value in quantization.items():
        if key not in _KNOWN[method]:
            raise ModelError(
                f"quantization_config: {key}={value!r} is not known for {method!r}; {_REMEDY}"
            )
        if key in _LEGAL and value not in _LEGAL[key]:
            raise ModelError(
                f"quantization_config: {key}={value!r} of {method!r} is not supported, only "
                f"{_LEGAL[key][0]!r} is; {_REMEDY}"
            )
    block = quantization.get("weight_block_size")
    if method == FP8 and block not in ([FP8_BLOCK, FP8_BLOCK], (FP8_BLOCK, FP8_BLOCK)):
        raise ModelError(
            f"quantization_config: weight_block_size={block!r} of {method!r} is not supported, "
            f"only [{FP8_BLOCK}, {FP8_BLOCK}] is; {_REMEDY}"
        )
    return method
