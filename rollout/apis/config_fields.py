"""Fields of InferenceConfig, given as keywords of LLM and AsyncLLM."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping
from typing import Any

from rollout.config import CONFIG_HINTS, InferenceConfig
from rollout.errors import ConfigError
from rollout.keyword_hints import hint_of


def config_with(
    config: InferenceConfig | None, fields: Mapping[str, Any], *more_names: str
) -> InferenceConfig:
    """`config`, or the default one, with `fields` replaced. Raises ConfigError.

    `more_names`: other keywords that the user may have meant by an unknown one.
    """
    known = [field.name for field in dataclasses.fields(InferenceConfig)]
    for name, value in fields.items():
        if name in CONFIG_HINTS:
            raise ConfigError(hint_of(name, value, CONFIG_HINTS))
        if name not in known:
            nearest = difflib.get_close_matches(name, [*known, *more_names], n=1)
            remedy = f"did you mean {nearest[0]}?" if nearest else "see rollout.InferenceConfig"
            raise ConfigError(f"{name}={value!r} is unknown; {remedy}")
    return (config or InferenceConfig()).replace(**fields)
