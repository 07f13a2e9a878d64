"""make_engine: creates the engine that a config names, from this or another package.

Used by `rollout.apis.spmd`, for LLM, and by `rollout.apis.engine_process`. Another package offers
an engine with an entry point in the group "rollout.engines", which is imported when a config names
it. The entry point is a function with the arguments and the result of `make_engine`.
"""

from __future__ import annotations

from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from torch import nn

from rollout.config import ENGINE_PACKAGES, OWN_ENGINE, InferenceConfig
from rollout.engine.build import DynamicInferenceEngine
from rollout.engine.engine import Engine
from rollout.errors import ConfigError
from rollout.keyword_hints import remedy_of_unknown
from rollout.text import Tokenizer


def make_engine(
    model: str | Path | nn.Module | Any,
    config: InferenceConfig,
    tokenizer: Tokenizer | None,
    weights_version: int,
) -> Engine:
    """Return a new engine from the package that `config.engine` names.

    The arguments are those of DynamicInferenceEngine.from_model. Raises ConfigError for an unknown
    engine, for a missing package, and for fields that the engine does not support. Raises
    ModelError for a model that cannot be built.
    """
    if config.engine == OWN_ENGINE:
        return DynamicInferenceEngine.from_model(model, config, tokenizer, weights_version)
    points = {point.name: point for point in entry_points(group=ENGINE_PACKAGES)}
    if config.engine not in points:
        known = sorted({OWN_ENGINE, *points})
        otherwise = f"use one of: {', '.join(known)}"
        remedy = remedy_of_unknown(config.engine, known, otherwise, cutoff=0.6)
        raise ConfigError(f"engine={config.engine!r} is unknown; {remedy}")
    make = points[config.engine].load()
    engine: Engine = make(model, config, tokenizer, weights_version)
    return engine
