"""Runs a Hydra job whose whole config is one frozen dataclass: parses overrides, prints errors.

Used by `trainer_hooks.train.main` (`run_hydra_job`, `given_overrides`), `trainer_hooks.train.job`
(`checked_overrides`) and `trainer_hooks.train.run_files` (`wandb_names`). It rewrites sys.argv.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig
from rich.console import Console

from rollout.errors import ConfigError
from rollout.keyword_hints import field_types
from trainer_hooks.environments import EnvironmentFailed
from trainer_hooks.rewards import RewardFunctionError
from trainer_hooks.train.config_loading import (
    dataclass_by_name,
    dataclass_of,
    load_dataclass,
    unknown_key_error,
)
from trainer_hooks.train.override_help import is_override, override_help
from trainer_hooks.update.guarded_step import NonFiniteGradientError

# Errors that end a job with their message alone; for others Hydra prints a traceback.
_FAULTS = (ConfigError, EnvironmentFailed, NonFiniteGradientError, RewardFunctionError)
T = TypeVar("T")


def run_hydra_job(
    job: Callable[[T], None], kind: type[T], config_path: str, config_name: str
) -> None:
    """Compose the config from the command line and call `job` with it as a `kind`.

    `kind`: the dataclass of the whole config.
    `config_path`, `config_name`: directory of the YAML files, and default entry config in it.
    `--multirun` calls `job` once per combination, and `--help` prints `override_help` instead. A
    ConfigError, non-finite gradients, and a reward function or environment that never succeeds
    raise SystemExit with their message.
    """

    def compose_and_call(config: DictConfig) -> None:
        try:
            job(load_dataclass(kind, config))
        except _FAULTS as error:
            raise SystemExit(f"error: {error}") from error

    entry = hydra.main(version_base="1.3", config_path=config_path, config_name=config_name)
    try:
        # Hydra's parser refuses overrides on both sides of a flag.
        sys.argv[1:] = sorted(checked_overrides(sys.argv[1:], kind), key=is_override)
        if not {"--help", "-h"}.isdisjoint(sys.argv):
            text = override_help(kind, Path(config_path), config_name, sys.argv[1:])
            Console().print(text, markup=False, highlight=False, soft_wrap=True)
            return
        entry(compose_and_call)()
    except ConfigError as error:
        raise SystemExit(f"error: {error}") from error


def given_overrides() -> list[str]:
    """Return the overrides of the running Hydra job, as `key=value`; [] outside of a Hydra job."""
    if not HydraConfig.initialized():
        return []
    return [override.lstrip("+") for override in HydraConfig.get().overrides.task]


def wandb_names(run_name: str, part: str) -> tuple[str, str]:
    """Return the name and the group of a W&B run. `part`: part of the job, such as "seed_0".

    The jobs of a `--multirun` share a group; each is named after its number and its overrides.
    """
    if not HydraConfig.initialized() or HydraConfig.get().mode is not RunMode.MULTIRUN:
        return f"{run_name}-{part}", run_name
    number, given = HydraConfig.get().job.num, ",".join(given_overrides())
    return f"{run_name}-{number}-{part}-{given}", f"{run_name}-multirun"


def checked_overrides(arguments: Sequence[str], kind: type) -> list[str]:
    """Return `arguments` with every plain `key=value` checked against the fields of `kind`.

    Hydra accepts only keys that a YAML file lists, so the keys of fields become `++key=value`. A
    config group that is given by an import path, as in reward=package.module:function, becomes the
    overrides that its dataclass returns from `overrides_of`. Other groups pass unchanged, as do the
    groups in `kind.PRESETS`, flags, `+`, `++` and `~` overrides, and Hydra's own keys. Raises
    ConfigError for an unknown key.
    """
    return [checked for argument in arguments for checked in _checked_override(argument, kind)]


def _checked_override(argument: str, kind: type) -> list[str]:
    key, assigned, value = argument.partition("=")
    if not assigned or key[0] in "+-~" or key.partition("/")[0].partition(".")[0] == "hydra":
        return [argument]
    part: type | None = kind
    by_name: type | None = None  # the dataclass of a mapping's entries; the next name is free
    if key in getattr(kind, "PRESETS", ()):
        return [argument]
    names = key.split(".")
    for position, name in enumerate(names):
        if by_name is not None:
            part, by_name = by_name, None
            continue
        assert part is not None
        types_by_name = field_types(part)
        if name not in types_by_name:
            path, rest = ".".join(names[:position]), ".".join(names[position:])
            raise unknown_key_error(rest, types_by_name, path)
        part, by_name = dataclass_of(types_by_name[name]), dataclass_by_name(types_by_name[name])
        if part is None and by_name is None:
            return [f"++{argument}"]
    if part is not None and ":" in value and hasattr(part, "overrides_of"):
        overrides: list[str] = part.overrides_of(value)
        return overrides
    # A whole dataclass is a config group, as in `model=small`: Hydra chooses.
    return [argument] if len(names) == 1 else [f"++{argument}"]
