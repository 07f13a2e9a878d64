"""Family: what sets one model family apart from the common decoder, as plain values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One `model_type` of Hugging Face configs.

    A bias is there always (True), never (False), or as the named config key says.
    """

    name: str
    architecture: str
    qkv_bias: bool | str
    output_bias: bool | str
    mlp_bias: bool | str
    qk_norm: bool
    default_head_dim: int | None  # None: hidden size / heads


def has_bias(rule: bool | str, config: Mapping[str, Any]) -> bool:
    """Whether a bias exists in a model with this config; `rule` is one of Family's three."""
    return bool(config.get(rule, False)) if isinstance(rule, str) else rule
