"""A Hydra job whose whole config is one frozen dataclass."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Sequence
from typing import TypeVar

import hydra
from omegaconf import DictConfig

from rollout.errors import ConfigError
from trainer_hooks.config_loading import init_field_types, load_dataclass, unknown_key_error

T = TypeVar("T")


def run_hydra_job(
    job: Callable[[T], None], kind: type[T], config_path: str, config_name: str
) -> None:
    """Compose the config from the command line and call `job` with it as a `kind`.

    `config_path`: where the YAML is, as hydra.main takes it; "pkg://conf" works in any directory.
    `--multirun` calls `job` once per combination. A ConfigError ends the process with its message.
    """

    def compose_and_call(config: DictConfig) -> None:
        job(load_dataclass(kind, config))

    entry = hydra.main(version_base="1.3", config_path=config_path, config_name=config_name)
    try:
        sys.argv[1:] = checked_overrides(sys.argv[1:], kind)
        entry(compose_and_call)()
    except ConfigError as error:
        raise SystemExit(f"error: {error}") from error


def checked_overrides(arguments: Sequence[str], kind: type) -> list[str]:
    """`arguments` with every plain `key=value` checked against the fields of `kind`.

    Hydra knows only the keys that the YAML lists: a field left at its default there becomes
    `++key=value`, which Hydra takes. Flags, `+`, `++` and `~` overrides, and Hydra's own keys pass.
    Raises ConfigError for a key that `kind` does not have, naming the nearest one.
    """
    return [_checked_override(argument, kind) for argument in arguments]


def _checked_override(argument: str, kind: type) -> str:
    key, assigned, _ = argument.partition("=")
    if not assigned or key[0] in "-+~" or key.partition("/")[0].partition(".")[0] == "hydra":
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
