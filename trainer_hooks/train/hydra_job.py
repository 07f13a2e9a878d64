"""Runs a Hydra job whose config is one frozen dataclass. Parses overrides and reports mistakes.

Used by `trainer_hooks.train.command` (`run_hydra_job`), `trainer_hooks.train.summary`
(`given_overrides`) and `trainer_hooks.train.run_files`. It rewrites sys.argv.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig
from rich.console import Console

import trainer_hooks
from rollout.errors import ConfigError
from trainer_hooks.environments.faults import EnvironmentFailed
from trainer_hooks.rewards.failures import RewardFunctionError
from trainer_hooks.train.config_loading import load_dataclass
from trainer_hooks.train.override_help import override_help
from trainer_hooks.train.overrides import read_words, settings_of

T = TypeVar("T")


def run_hydra_job(
    job: Callable[[T], None], kind: type[T], config_path: str, config_name: str
) -> None:
    """Compose the config from the command line and call `job` with it as a `kind`. `--multirun`
    calls `job` once per combination, and `--help` prints `override_help` instead.

    `config_path`: directory of the YAML files.
    `config_name`: entry config if the command line names none.

    Raises ConfigError for a mistake on the command line. Raises SystemExit with the message of an
    expected error of `job`: ConfigError, EnvironmentFailed, RewardFunctionError, ProducerError or
    NonFiniteGradientError.
    """

    def compose_and_call(config: DictConfig) -> None:
        try:
            job(load_dataclass(kind, config))
        except (  # these end a job with their message alone; for others Hydra prints a traceback
            ConfigError,
            EnvironmentFailed,
            RewardFunctionError,
            trainer_hooks.NonFiniteGradientError,
            trainer_hooks.ProducerError,
        ) as error:
            raise SystemExit(f"rollout: error: {error}") from error

    words = read_words(sys.argv[1:], kind, config_name)
    if words.options.help:
        text = override_help(kind, Path(config_path), words)
        Console().print(text, markup=False, highlight=False, soft_wrap=True)
        return
    settings_of(words, kind, Path(config_path))  # raises what Hydra would print
    sys.argv[1:] = words.all
    hydra.main(version_base="1.3", config_path=config_path, config_name=config_name)(
        compose_and_call
    )()


def given_overrides() -> list[str]:
    """Return the overrides of the running Hydra job as `key=value`, or [] if none runs."""
    if not HydraConfig.initialized():
        return []
    return [override.lstrip("+") for override in HydraConfig.get().overrides.task]


def wandb_names(run_name: str, part: str) -> tuple[str, str]:
    """Return the name and the group of a W&B run. `part` is a part of the job, such as "seed_0".
    The jobs of a `--multirun` share a group, and their names contain their number and overrides."""
    if not HydraConfig.initialized() or HydraConfig.get().mode is not RunMode.MULTIRUN:
        return f"{run_name}-{part}", run_name
    number, given = HydraConfig.get().job.num, ",".join(given_overrides())
    return f"{run_name}-{number}-{part}-{given}", f"{run_name}-multirun"
