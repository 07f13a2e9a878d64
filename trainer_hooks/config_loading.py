"""From nested mappings, as Hydra composes them, to frozen dataclasses that know their keys."""

from __future__ import annotations

import dataclasses
import difflib
import types
import typing
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from omegaconf import DictConfig, OmegaConf

from rollout.errors import ConfigError

T = TypeVar("T")


def load_dataclass(kind: type[T], values: Mapping[str, Any] | DictConfig, path: str = "") -> T:
    """`kind(**values)`; a field that is itself a dataclass takes a nested mapping.

    `path`: where `values` stand in the whole config, for error messages.
    Raises ConfigError for an unknown key (naming the nearest valid one), a missing key and a value
    of another type; what `kind` raises on its own passes through.
    """
    if isinstance(values, DictConfig):
        container = OmegaConf.to_container(values, resolve=True)
        given = typing.cast(dict[str, Any], container)
    else:
        given = dict(values)
    field_types = init_field_types(kind)
    for name in given:
        if name not in field_types:
            raise unknown_key_error(name, field_types, path)
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


def init_field_types(kind: type) -> dict[str, Any]:
    """Names of the fields a dataclass is made from, with their types."""
    hints = typing.get_type_hints(kind)
    return {field.name: hints[field.name] for field in dataclasses.fields(kind) if field.init}


def unknown_key_error(name: str, known: Iterable[str], path: str = "") -> ConfigError:
    """The error for a key that does not exist: it names the nearest one, or all of them."""
    known = sorted(known)
    nearest = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    remedy = f"did you mean {_join(path, nearest[0])}?" if nearest else f"known: {', '.join(known)}"
    return ConfigError(f"unknown config key {_join(path, name)}; {remedy}")


def _convert(kind: Any, value: Any, path: str) -> Any:
    """`value` as a field of type `kind`: nested mappings become dataclasses, lists tuples."""
    if dataclasses.is_dataclass(kind) and isinstance(value, Mapping):
        return load_dataclass(typing.cast(type, kind), value, path)
    if not _fits(kind, value):
        raise ConfigError(f"{path}={value!r} does not fit its type, {_type_name(kind)}")
    return tuple(value) if typing.get_origin(kind) is tuple else value


def _fits(kind: Any, value: Any) -> bool:
    """Whether a plain value can stand for `kind`; enums and the like check theirs themselves."""
    origin = typing.get_origin(kind)
    if origin in (typing.Union, types.UnionType):
        return any(_fits(option, value) for option in typing.get_args(kind))
    if origin is typing.Literal:
        return value in typing.get_args(kind)
    if kind in (int, float):
        return isinstance(value, (int, kind)) and not isinstance(value, bool)
    if kind in (bool, str, types.NoneType):
        return isinstance(value, kind)
    if origin in (tuple, list):
        return isinstance(value, (list, tuple))
    return not dataclasses.is_dataclass(kind)


def _type_name(kind: Any) -> str:
    return kind.__name__ if isinstance(kind, type) else str(kind).replace("typing.", "")


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
