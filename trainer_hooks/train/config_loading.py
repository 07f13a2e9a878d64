"""Makes frozen dataclasses from nested mappings, as Hydra composes them; refuses unknown keys."""

from __future__ import annotations

import dataclasses
import difflib
import enum
import types
import typing
from collections.abc import Mapping
from typing import Any, TypeVar

from omegaconf import MISSING, DictConfig, OmegaConf

from rollout.errors import ConfigError
from trainer_hooks.train.config_hints import hint_for

T = TypeVar("T")


def load_dataclass(kind: type[T], values: Mapping[str, Any] | DictConfig, path: str = "") -> T:
    """`kind(**values)`; a field that is itself a dataclass takes a nested mapping.

        settings = load_dataclass(JobSettings, hydra.compose("train_grpo"))

    `path`: where `values` stand in the whole config, for error messages.
    Raises ConfigError for an unknown key (with our name of a key of TRL, verl or Megatron-LM, or
    else the nearest valid one), for a missing key and for a value of another type. Errors of `kind`
    itself pass through.
    """
    if isinstance(values, DictConfig):
        values = typing.cast(dict[str, Any], OmegaConf.to_container(values, resolve=True))
    return _load(kind, values, path)


def init_field_types(kind: type) -> dict[str, Any]:
    """The names of the fields that a dataclass is made from, with their types."""
    hints = typing.get_type_hints(kind)
    return {field.name: hints[field.name] for field in dataclasses.fields(kind) if field.init}


def dataclass_by_name(kind: Any) -> type | None:
    """The dataclass of a field `Mapping[str, dataclass]`; None for any other type."""
    is_mapping = typing.get_origin(kind) is Mapping
    return dataclass_of(typing.get_args(kind)[1]) if is_mapping else None


def dataclass_of(kind: Any) -> type | None:
    """`kind` if it is a dataclass, or the dataclass in `X | None`; None for any other type."""
    options = typing.get_args(kind) if _is_union(kind) else (kind,)
    found = (o for o in options if isinstance(o, type) and dataclasses.is_dataclass(o))
    return next(found, None)


def _load(kind: type[T], given: Mapping[str, Any], path: str) -> T:
    field_types = init_field_types(kind)
    for name in given:
        if name not in field_types:
            raise unknown_key_error(_first_leaf(name, given[name]), field_types, path)
    # A key that YAML leaves open, as ???, counts as absent.
    given = {name: value for name, value in given.items() if not _is_left_open(value)}
    required = {
        field.name
        for field in dataclasses.fields(kind)  # type: ignore[arg-type]
        if field.init
        and field.default is dataclasses.MISSING
        and field.default_factory is dataclasses.MISSING
    }
    if missing := sorted(required - set(given)):
        raise ConfigError(f"{_join(path, missing[0])} is missing; {kind.__name__} has no default")
    return kind(
        **{
            name: _convert(field_types[name], value, _join(path, name))
            for name, value in given.items()
        }
    )


def unknown_key_error(key: str, known: Mapping[str, Any], path: str = "") -> ConfigError:
    """The error for a key that does not exist below `path`, where `known` keys of these types do.

    It names our key for one of another system, or else where that key is one level below, the
    nearest key, or all keys.
    """
    if hint := hint_for(_join(path, key)):
        return ConfigError(f"unknown config key {_join(path, key)}; {hint}")
    parts = {name: dataclass_of(inner) for name, inner in known.items()}
    below = [n for n, part in parts.items() if part and key in init_field_types(part)]
    if below:
        places = " or ".join(_join(path, f"{name}.{key}") for name in below)
        return ConfigError(f"unknown config key {_join(path, key)}; did you mean {places}?")
    name = key.partition(".")[0]
    nearest = difflib.get_close_matches(name, sorted(known), n=1, cutoff=0.5)
    remedy = f"known: {', '.join(sorted(known))}"
    if nearest:
        remedy = f"did you mean {_join(path, nearest[0])}?"
    return ConfigError(f"unknown config key {_join(path, name)}; {remedy}")


def as_plain(value: Any) -> Any:
    """A loaded config as YAML can hold it: mappings, lists, numbers and text."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {name: as_plain(getattr(value, name)) for name in init_field_types(type(value))}
    if isinstance(value, Mapping):
        return {str(name): as_plain(part) for name, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [as_plain(part) for part in value]
    if isinstance(value, enum.Enum):
        return value.value
    return value if isinstance(value, (bool, int, float, str, types.NoneType)) else repr(value)


def _convert(kind: Any, value: Any, path: str) -> Any:
    """`value` as a field of type `kind`: nested mappings become dataclasses, lists tuples."""
    part = dataclass_of(kind)
    if part is not None and isinstance(value, Mapping):
        return _load(part, value, path)
    named = dataclass_by_name(kind)
    if named is not None and isinstance(value, Mapping):
        return {name: _convert(named, own, _join(path, name)) for name, own in value.items()}
    if not _fits(kind, value):
        raise ConfigError(f"{path}={value!r} does not fit its type, {_type_name(kind)}")
    return tuple(value) if typing.get_origin(kind) is tuple else value


def _first_leaf(name: str, value: Any) -> str:
    """The key of the first value below `name`."""
    while isinstance(value, Mapping) and value:
        inner, value = next(iter(value.items()))
        name = f"{name}.{inner}"
    return name


def _is_union(kind: Any) -> bool:
    return typing.get_origin(kind) in (typing.Union, types.UnionType)


def _is_left_open(value: Any) -> bool:
    return isinstance(value, str) and value == MISSING


def _fits(kind: Any, value: Any) -> bool:
    """Whether a plain value can stand for `kind`; enums and the like check theirs themselves."""
    origin = typing.get_origin(kind)
    if _is_union(kind):
        return any(_fits(option, value) for option in typing.get_args(kind))
    if origin is typing.Literal:
        return value in typing.get_args(kind)
    if kind in (int, float):
        return isinstance(value, (int, kind)) and not isinstance(value, bool)
    if kind in (bool, str, types.NoneType):
        return isinstance(value, kind)
    if origin in (tuple, list):
        return isinstance(value, (list, tuple))
    if origin is Mapping:
        return isinstance(value, Mapping)
    return not dataclasses.is_dataclass(kind)


def _type_name(kind: Any) -> str:
    return kind.__name__ if isinstance(kind, type) else str(kind).replace("typing.", "")


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
