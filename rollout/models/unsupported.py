"""Config features that would change the numbers and are not implemented: refuse them by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rollout.errors import ModelError


def refuse_unsupported(config: Mapping[str, Any], num_layers: int) -> None:
    """Raise ModelError if the model's outputs would differ from what its config asks for."""
    if config.get("quantization_config"):
        raise ModelError(
            "quantization_config is not supported; use an unquantized checkpoint of this model"
        )
    activation = config.get("hidden_act", "silu")
    if activation != "silu":
        raise ModelError(f"hidden_act={activation!r} is not supported; only 'silu' is")
    for key in ("num_experts", "num_local_experts", "n_routed_experts"):
        if config.get(key):
            raise ModelError(f"{key}={config[key]}: mixtures of experts are not supported")
    if uses_sliding_window(config, num_layers):
        raise ModelError(
            "sliding-window attention is not supported; set use_sliding_window to false to attend "
            "to the whole context in every layer"
        )


def uses_sliding_window(config: Mapping[str, Any], num_layers: int) -> bool:
    """Whether any layer of this model has a window. A window size alone does not switch it on."""
    layer_types = config.get("layer_types")
    if layer_types:
        return any(layer_type != "full_attention" for layer_type in layer_types)
    has_window = bool(config.get("use_sliding_window")) and config.get("sliding_window") is not None
    return has_window and num_layers > int(config.get("max_window_layers") or 0)
