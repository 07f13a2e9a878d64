"""`rollout train --help`: the config groups, and each key with its value and the value's source.

Used by `trainer_hooks.train.hydra_job` before Hydra composes a config, because help must not need a
complete config. It reads config files.
"""

from __future__ import annotations

import dataclasses
import enum
import json
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from hydra.types import RunMode
from omegaconf import MISSING, OmegaConf

from rollout.keyword_hints import field_types
from trainer_hooks.train.config_loading import as_plain, dataclass_of
from trainer_hooks.train.overrides import (
    Words,
    check_groups,
    entry_configs,
    errors_on_one_line,
    groups_of,
    opened_configs,
    parsed_override,
)

_USAGE = """\
usage: rollout train [--config-name NAME] [--config-dir DIR] [GROUP=OPTION ...] [KEY=VALUE ...]

Train a model by reinforcement learning. An entry config chooses an option of each group; your
overrides come on top.

  --config-name NAME  the entry config: {entries}; train if not given
  --config-dir DIR    a directory with configs of your own
  --multirun          run each combination of KEY=VALUE,VALUE
  --cfg job           print the composed config as YAML and exit
"""
_DEFAULT = "default"


class Setting(NamedTuple):
    """A value of a key, and its source: a file of conf/, "command line" or "default"."""

    value: Any
    source: str


def override_help(kind: type, directory: Path, words: Words) -> str:
    """Return the help of a job whose whole config is a `kind`.

    `directory` has the configs, and `words` is the command line. Raises ConfigError for a config or
    an option that does not exist.
    """
    with opened_configs(directory, words) as loader, errors_on_one_line():
        return "\n".join(_help(kind, loader, words))


def _help(kind: type, loader: Any, words: Words) -> Iterator[str]:
    config_name = words.options.config_name
    overrides = [parsed_override(override) for override in words.overrides]
    # Only a multirun accepts a group without a choice, such as `data` of train.yaml.
    check_groups(loader, config_name, overrides, kind, RunMode.MULTIRUN)
    composed = loader.compute_defaults_list(config_name, words.overrides, RunMode.MULTIRUN)
    written: dict[str, Setting] = {}
    for part in composed.defaults:
        if not part.config_path.startswith("hydra/"):
            values = OmegaConf.to_container(loader.repository.load_config(part.config_path).config)
            _write(written, part.package or "", values, f"{part.config_path}.yaml")
    groups = groups_of(loader)
    for override in overrides:
        if override.is_delete():
            _delete(written, override.key_or_group)
        elif override.key_or_group not in groups:
            _, _, text = (override.input_line or "").partition("=")
            value = text if override.is_sweep_override() else override.value()
            _write(written, override.key_or_group, value, "command line")
    yield _USAGE.format(entries=", ".join(entry_configs(loader)))
    yield f"groups of {config_name}, GROUP=OPTION:"
    for group in groups:
        chosen = composed.overrides.known_choices.get(group)
        others = [name for name in loader.get_group_options(group) if name != chosen]
        given = f"{group}={'' if chosen == MISSING else chosen}"
        yield f"  {given:<26} or {', '.join(others)}"
    yield f"\nkeys of {config_name}, KEY=VALUE, and where the value comes from:"
    section = ""
    for key, choices, setting in _settings(kind, written, ""):
        if key.partition(".")[0] != section:
            section = key.partition(".")[0]
            yield ""
        shown = setting.value if isinstance(setting.value, str) else json.dumps(setting.value)
        if is_open := setting.value == MISSING:
            shown = ""
        given, source = f"{key}={shown}", "required" if is_open else setting.source
        yield f"  {given:<58} {source}{f': {choices}' if choices else ''}"


def _write(written: dict[str, Setting], key: str, value: Any, source: str) -> None:
    """Put `value` into `written` at the dotted key. The entries of a mapping are merged one by
    one."""
    if isinstance(value, Mapping) and value:
        for name, own in value.items():
            _write(written, f"{key}.{name}" if key else str(name), own, source)
    else:
        if not isinstance(value, Mapping):
            _delete(written, key)
        written[key] = Setting(value, source)


def _delete(written: dict[str, Setting], key: str) -> None:
    for name in [name for name in written if f"{name}.".startswith(f"{key}.")]:
        del written[name]


def _settings(
    kind: type, written: Mapping[str, Setting], path: str
) -> Iterator[tuple[str, str, Setting]]:
    """Yield the key, choices and setting of each field of the dataclass `kind` at `path`. A mapping
    with free names, such as reward.terms, has a row for each value in it."""
    types = field_types(kind)
    for field in dataclasses.fields(kind):
        if not field.init:
            continue
        key = f"{path}.{field.name}" if path else field.name
        part, default = dataclass_of(types[field.name]), _default(field)
        below = {name: own for name, own in written.items() if name.startswith(f"{key}.")}
        if part is None and below:
            yield from ((name, "", setting) for name, setting in below.items())
        elif part is None or (default.value is None and not below):
            yield key, _choices(types[field.name]), written.get(key, default)
        if part is not None:
            yield from _settings(part, written, key)


def _default(field: dataclasses.Field[Any]) -> Setting:
    if field.default is not dataclasses.MISSING:
        return Setting(as_plain(field.default), _DEFAULT)
    if field.default_factory is not dataclasses.MISSING:
        return Setting(as_plain(field.default_factory()), _DEFAULT)
    return Setting(MISSING, _DEFAULT)


def _choices(kind: Any) -> str:
    """Return the values of a Literal or an enum, or "" for other types."""
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return ", ".join(str(member.value) for member in kind)
    options = typing.get_args(kind)
    if typing.get_origin(kind) is typing.Literal:
        return ", ".join(map(str, options))
    return ", ".join(filter(None, map(_choices, options)))
