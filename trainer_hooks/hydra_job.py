"""A Hydra job whose whole config is one frozen dataclass."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from rich.console import Console, Group, RenderableType
from rich.syntax import Syntax
from rich.text import Text

from rollout.errors import ConfigError
from trainer_hooks.config_loading import as_plain, load_dataclass, unknown_key_error
from trainer_hooks.config_translation import COMMAND_LINE_KEY, init_field_types, is_alias

T = TypeVar("T")


def run_hydra_job(
    job: Callable[[T], None],
    kind: type[T],
    config_path: str,
    config_name: str,
    shows_config: Callable[[T], bool] = lambda settings: True,
) -> None:
    """Compose the config from the command line, print it, and call `job` with it as a `kind`.

    `config_path`: where the YAML is, as hydra.main takes it; "pkg://conf" works in any directory.
    Keys of TRL, verl and Megatron-LM are taken for ours (`config_aliases.ALIASES`).
    `shows_config`: whether a loaded config is printed at the start, with the aliases used.
    `--multirun` calls `job` once per combination. A ConfigError ends the process with its message.
    """

    def compose_and_call(config: DictConfig) -> None:
        notes: list[str] = []
        overridden = overridden_keys(HydraConfig.get().overrides.task)
        try:
            settings = load_dataclass(kind, config, overridden=overridden, notes=notes)
        except ConfigError as error:
            # Of another exception Hydra would print a traceback, and the message far above it.
            raise SystemExit(f"error: {error}") from error
        if shows_config(settings):
            Console().print(config_report(settings, notes))
        job(settings)

    entry = hydra.main(version_base="1.3", config_path=config_path, config_name=config_name)
    try:
        sys.argv[1:] = checked_overrides(sys.argv[1:], kind)
        entry(compose_and_call)()
    except ConfigError as error:
        raise SystemExit(f"error: {error}") from error


def wandb_names(run_name: str, part: str) -> tuple[str, str]:
    """Name and group of the W&B run of `part` of this job, such as "seed_0".

    The jobs of a `--multirun` share a group; each is named after its number and its overrides.
    """
    if not HydraConfig.initialized() or HydraConfig.get().mode is not RunMode.MULTIRUN:
        return f"{run_name}-{part}", run_name
    job, overrides = HydraConfig.get().job, HydraConfig.get().overrides.task
    given = ",".join(item.lstrip("+").removeprefix(f"{COMMAND_LINE_KEY}.") for item in overrides)
    return f"{run_name}-{job.num}-{part}-{given}", f"{run_name}-multirun"


def config_report(settings: Any, notes: Sequence[str] = ()) -> RenderableType:
    """The loaded config as YAML, and a line for each alias that was translated."""
    yaml = OmegaConf.to_yaml(OmegaConf.create(as_plain(settings)))
    lines = [Text(f"config: {note}", style="yellow") for note in notes]
    return Group(Syntax(yaml.rstrip(), "yaml", background_color="default"), *lines)


def overridden_keys(overrides: Sequence[str]) -> set[str]:
    """The keys that the `key=value` overrides of a command line set."""
    return {override.partition("=")[0].lstrip("+") for override in overrides}


def checked_overrides(arguments: Sequence[str], kind: type) -> list[str]:
    """`arguments` with every plain `key=value` checked against the fields of `kind`.

    Hydra knows only the keys that the YAML lists: a field left at its default there becomes
    `++key=value`, which Hydra takes; an alias becomes a key that `load_dataclass` translates.
    Flags, other `+`, `++` and `~` overrides, and Hydra's own keys pass.
    Raises ConfigError for a key that `kind` does not have, naming the nearest one.
    """
    return [_checked_override(argument, kind) for argument in arguments]


def _checked_override(argument: str, kind: type) -> str:
    key, assigned, _ = argument.partition("=")
    if not assigned or key[0] in "-~" or key.partition("/")[0].partition(".")[0] == "hydra":
        return argument
    if is_alias(kind, key.lstrip("+")):
        return f"+{COMMAND_LINE_KEY}.{argument.lstrip('+')}"
    if key[0] == "+":
        return argument
    path = ""
    for name in key.split("."):
        if not dataclasses.is_dataclass(kind):
            return argument
        field_types = init_field_types(kind)
        if name not in field_types:
            raise unknown_key_error(name, field_types, path)
        path, kind = f"{path}.{name}" if path else name, field_types[name]
    # A whole dataclass is a config group, `model=small`, whose choice is Hydra's to make.
    return argument if dataclasses.is_dataclass(kind) else f"++{argument}"
