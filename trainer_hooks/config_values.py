"""Nested mappings, read and changed by keys such as `algorithm.loss.kind`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# What `lookup` gives for a key that is not there; None is a value.
ABSENT: Any = object()


def copied(values: Mapping[str, Any]) -> dict[str, Any]:
    """Mappings of their own, with the same values."""
    return {
        name: copied(value) if isinstance(value, Mapping) else value
        for name, value in values.items()
    }


def lookup(values: Any, key: str) -> Any:
    """What stands at `key`; ABSENT if nothing does."""
    for name in key.split("."):
        if not isinstance(values, dict) or name not in values:
            return ABSENT
        values = values[name]
    return values


def store(values: dict[str, Any], key: str, value: Any) -> None:
    """Put `value` at `key`, in new mappings where there are none."""
    *parents, last = key.split(".")
    for name in parents:
        values = values.setdefault(name, {})
    values[last] = value


def remove(values: dict[str, Any], key: str) -> None:
    """Take out `key`, and the mappings that it leaves empty."""
    name, _, rest = key.partition(".")
    if rest:
        remove(values[name], rest)
    if not rest or not values[name]:
        del values[name]


def leaves(values: Mapping[str, Any], path: str = "") -> list[str]:
    """The keys of all values that are no mappings, below `path`."""
    keys = []
    for name, value in values.items():
        key = joined(path, name)
        keys += leaves(value, key) if isinstance(value, Mapping) else [key]
    return keys


def joined(path: str, name: str) -> str:
    """The key of `name` below `path`, which may be empty."""
    return f"{path}.{name}" if path else name
