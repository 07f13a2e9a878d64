"""Checks a job's command line before Hydra composes its config. Each mistake raises one
ConfigError.

Used by `trainer_hooks.train` (hydra_job, job, override_help). Hydra itself reports mistakes in
several lines. This module reads config files and imports no torch.
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, TypeVar

from hydra import initialize_config_dir
from hydra._internal.utils import get_args_parser
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import MISSING, OmegaConf

from rollout.errors import ConfigError
from rollout.keyword_hints import field_types, remedy_of_unknown
from trainer_hooks.train.config_loading import (
    dataclass_by_name,
    dataclass_of,
    hint_for,
    load_dataclass,
    unknown_key_error,
)

T = TypeVar("T")
_NO_ENTRIES = ("_dummy_empty_config_", "base")
# The option of the group `data` that reads a file of prompts, by the file's suffix.
_READERS = {".jsonl": "jsonl", ".json": "jsonl", ".parquet": "parquet"}


class Words(NamedTuple):
    """A command line: Hydra's options, the words before the overrides (`flags`), and checked
    overrides."""

    options: argparse.Namespace
    flags: list[str]
    overrides: list[str]

    @property
    def all(self) -> list[str]:
        """Return the command line for Hydra, with all overrides after the flags."""
        return [*self.flags, *self.overrides]


def read_words(arguments: Sequence[str], kind: type, config_name: str) -> Words:
    """Return the parsed command line of a job whose whole config is a `kind`.

    `config_name` is the entry config if no option names one. Raises ConfigError for an unknown
    option, an unknown key, and a word that is no override.
    """
    flags = [argument for argument in arguments if not is_override(argument)]
    given = [argument for argument in arguments if is_override(argument)]
    parser = get_args_parser()
    parser.error = _refuse  # type: ignore[method-assign]
    options, unknown = parser.parse_known_args(flags)
    options.config_name = (options.config_name or config_name).removesuffix(".yaml")
    alone = [*options.overrides, *(word for word in unknown if not word.startswith("-"))]
    for word in unknown:
        if word.startswith("-"):
            flag, _, value = word.partition("=")
            name = flag.lstrip("-").replace("-", "_")
            remedy = _remedy(name, value or next(iter(alone), "..."), kind)
            raise ConfigError(f"{word} is unknown; {remedy}")
    if alone:
        word, before = alone[0], arguments[: list(arguments).index(alone[0])]
        last = next(filter(is_override, reversed(before)), None)
        raise ConfigError(f"{word!r} is not KEY=VALUE; {_remedy_of_word(word, last, kind)}")
    return Words(options, flags, checked_overrides(given, kind))


def is_override(argument: str) -> bool:
    """Return whether Hydra parses an argument as an override: KEY=VALUE or ~KEY."""
    return argument.startswith("~") or (not argument.startswith("-") and "=" in argument)


def settings_of(words: Words, kind: type[T], directory: Path) -> T | None:
    """Compose the config of a command line from `directory` and return it as a `kind`. Return None
    for a multirun, whose jobs have different configs. Raises ConfigError."""
    with opened_configs(directory, words) as loader:
        parsed = [parsed_override(override) for override in words.overrides]
        mode = RunMode.MULTIRUN if words.options.multirun else RunMode.RUN
        for override in parsed:
            if override.is_sweep_override() and mode is RunMode.RUN:
                raise _several_values(override, kind)
        with errors_on_one_line():
            try:
                config = loader.load_configuration(words.options.config_name, words.overrides, mode)
            except (HydraException, ValueError):  # ValueError: an option is no text
                check_groups(loader, words.options.config_name, parsed, kind, mode)
                raise
        if mode is RunMode.MULTIRUN:
            if not config.hydra.searchpath:  # the loader does not list its options
                check_groups(loader, words.options.config_name, parsed, kind, mode)
            return None
        own = OmegaConf.masked_copy(config, [name for name in config if name != "hydra"])
        return load_dataclass(kind, own)


@contextmanager
def opened_configs(directory: Path, words: Words) -> Iterator[Any]:
    """Yield Hydra's config loader for `directory` and the directory of --config-dir. Raises
    ConfigError for a directory or an entry config that does not exist."""
    own = words.options.config_dir
    if own is not None and not Path(own).is_dir():
        raise ConfigError(f"--config-dir {own} is not a directory; give one with config files")
    with initialize_config_dir(str(directory.resolve()), version_base="1.3"):
        loader: Any = GlobalHydra.instance().config_loader()
        if own is not None:
            loader.config_search_path.prepend("own", f"file://{Path(own).resolve()}")
            loader.repository.initialize_sources(loader.config_search_path)
        name, known = words.options.config_name, entry_configs(loader)
        if not loader.repository.config_exists(name):
            remedy = remedy_of_unknown(name, known, f"one of: {', '.join(known)}", cutoff=0.6)
            raise ConfigError(f"--config-name {name} is unknown; {remedy}")
        yield loader


@contextmanager
def errors_on_one_line() -> Iterator[None]:
    """Turn Hydra's errors in the block into ConfigErrors of one line."""
    try:
        yield
    except HydraException as error:
        message = " ".join(str(error).split()).rstrip(".")
        raise ConfigError(f"{message}; see rollout train --help") from error


def entry_configs(loader: Any) -> list[str]:
    """Return the values that --config-name accepts."""
    return [name for name in loader.get_group_options("") if name not in _NO_ENTRIES]


def groups_of(loader: Any) -> list[str]:
    return [group for group in loader.list_groups("") if group != "hydra"]


def check_groups(
    loader: Any, config_name: str, overrides: Sequence[Override], kind: type, mode: RunMode
) -> None:
    """Raise ConfigError for an override that chooses an option which its group lacks. In a single
    run, also raise it for a group without a choice."""
    for override in overrides:
        group = override.key_or_group
        if group not in groups_of(loader) or override.is_delete():
            continue
        options = loader.get_group_options(group)
        for choice in _choices_of(override):
            if choice not in options:
                remedy = _remedy_of_choice(group, choice, options, kind)
                raise ConfigError(f"{group}={choice} is unknown; {remedy}")
    if mode is RunMode.MULTIRUN:
        return
    # A multirun accepts groups without a choice, so this call lists all of them.
    lines = [override.input_line or "" for override in overrides]
    composed = loader.compute_defaults_list(config_name, lines, RunMode.MULTIRUN)
    for group, choice in composed.overrides.known_choices.items():
        if choice == MISSING:
            options = loader.get_group_options(group)
            example = "jsonl data.path=train.jsonl" if group == "data" else options[0]
            raise ConfigError(
                f"{group} is missing; give {group}=OPTION, such as {group}={example}; options: "
                f"{', '.join(options)}"
            )


def parsed_override(override: str) -> Override:
    """Return the parsed override. Raises ConfigError, which shows the quoted form, if a value needs
    quotes."""
    try:
        return OverridesParser.create().parse_override(override)
    except HydraException as error:
        key, _, value = override.lstrip("+").partition("=")
        raise ConfigError(
            f"{key}={value} needs quotes, for the shell and for the value: {_quoted(key, value)}"
        ) from error


def checked_overrides(arguments: Sequence[str], kind: type) -> list[str]:
    """Return `arguments` for Hydra, with every plain `key=value` checked against the fields of
    `kind`.

    Raises ConfigError for an unknown key. The key of a field becomes `++key=value`, because Hydra
    accepts only keys that a YAML file lists. A group given as an import path, such as
    reward=package.module:function, becomes the overrides from its dataclass's `overrides_of`. All
    other arguments pass unchanged: groups, flags, Hydra's own keys, and overrides with `+`, `++` or
    `~`.
    """
    return [checked for argument in arguments for checked in _checked_override(argument, kind)]


def _checked_override(argument: str, kind: type) -> list[str]:
    key, assigned, value = argument.partition("=")
    if not key:
        raise ConfigError(f"{argument!r} is not KEY=VALUE; see rollout train --help")
    if not assigned or key[0] in "+-~" or key.partition("/")[0].partition(".")[0] == "hydra":
        return [argument]
    part: type | None = kind
    by_name: type | None = None  # the dataclass of a mapping's entries, whose names are free
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
    # A whole dataclass is a config group, as in `model=small`, which Hydra resolves.
    return [argument] if len(names) == 1 else [f"++{argument}"]


# ---- remedies


def _refuse(message: str) -> NoReturn:
    raise ConfigError(f"{message}; see rollout train --help")


def _remedy(name: str, value: str, kind: type) -> str:
    key = name if name in field_types(kind) else _key_of(name, kind)
    if key is None:
        return hint_for(name) or "settings are written KEY=VALUE; see rollout train --help"
    return f"settings are written KEY=VALUE: {key}={value}"


def _key_of(name: str, kind: type) -> str | None:
    """Return the dotted key of a setting with this name, or None unless exactly one section has
    it."""
    types = {section: dataclass_of(inner) for section, inner in field_types(kind).items()}
    found = [s for s, part in types.items() if part is not None and name in field_types(part)]
    return f"{found[0]}.{name}" if len(found) == 1 else None


def _remedy_of_word(word: str, last: str | None, kind: type) -> str:
    """Return what to write in place of a word that is no override. `last` is the override before
    the word, whose unquoted value perhaps includes the word, or None."""
    if (remedy := _remedy_of_file(word)) is not None:
        return remedy
    key = word.replace("-", "_")
    if "." in key and key.partition(".")[0] in field_types(kind):
        return f"give it a value: {word}=VALUE"
    if ":" in word:
        return f"for a reward function give reward={word}"
    if last is not None:
        first, _, value = last.partition("=")
        quoted = _quoted(first, f"{value} {word}")
        return (
            f"if it belongs to the value before it, quote that: {quoted}; for an entry config give "
            f"--config-name {word}"
        )
    if (found := key if key in field_types(kind) else _key_of(key, kind)) is not None:
        return f"give it a value: {found}=VALUE"
    return f"for an entry config give --config-name {word}; see rollout train --help"


def _remedy_of_file(word: str) -> str | None:
    """Return how to give a file of prompts, or None if `word` names no such file."""
    reader = _READERS.get(Path(word).suffix)
    return reader and f"for a file of prompts give data={reader} data.path={word}"


def _remedy_of_choice(group: str, choice: str, options: Sequence[str], kind: type) -> str:
    if group == "data" and (remedy := _remedy_of_file(choice)) is not None:
        return remedy
    if group == "model" and ("/" in choice or Path(choice).is_dir()):
        return f"for a checkpoint give model.path={choice}"
    listed = f"options: {', '.join(options)}"
    remedy = remedy_of_unknown(choice.lower(), options, listed, cutoff=0.5, prefix=f"{group}=")
    if hasattr(dataclass_of(field_types(kind).get(group)), "overrides_of"):
        remedy += f"; for a function of yours give {group}=package.module:function"
    return remedy


def _choices_of(override: Override) -> list[str]:
    """Return the options that an override of a group chooses. A sweep or a list chooses several."""
    value: Any = override.sweep_iterator() if override.is_sweep_override() else override.value()
    if value is None:
        return ["null"]
    if isinstance(value, str | int | float):
        return [str(value)]
    return [str(each).strip("'\"") for each in value]


def _several_values(override: Override, kind: type) -> ConfigError:
    key, _, value = (override.input_line or "").lstrip("+").partition("=")
    text = str(_type_at(key, kind))
    remedies = [f"one value is quoted: {_quoted(key, value)}"] if "str" in text else []
    if "tuple" in text or "list" in text:
        remedies.append(f"a list is written '{key}=[{value}]'")
    remedies.append("--multirun runs each" if remedies else "give one, or --multirun to run each")
    return ConfigError(f"{key}={value} is several values; {', '.join(remedies)}")


def _type_at(key: str, kind: type) -> Any:
    """Return the type of the field at a dotted key, or None for a key of a free mapping."""
    found: Any = kind
    for name in key.split("."):
        part = dataclass_of(found)
        found = None if part is None else field_types(part).get(name)
    return found


def _quoted(key: str, value: str) -> str:
    """Return an override whose value is quoted for Hydra and for the shell."""
    text = value.strip("'\"").replace("\\", "\\\\").replace('"', '\\"')
    return shlex.quote(f'{key}="{text}"')
