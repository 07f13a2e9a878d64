"""Fields: the base class of structs that decode request bodies and queries.

Used by `rollout.serve.app`, which decodes requests, by the modules of rollout.serve that define
bodies or queries, and by the script http_fields. Each unknown field that is ignored is logged once.
"""

from __future__ import annotations

import difflib
import json
import logging
import re
import reprlib
import typing
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

import msgspec

from rollout.serve.errors import ApiError

_STATUS = "status"  # key of a field's status in its msgspec.Meta
_TYPO_CUTOFF = 0.8  # least difflib ratio; "temprature" has 0.95, "topk" 0.89
_NUM_WARNINGS = 256  # unknown fields that are remembered as logged
_MAX_SHOWN = 80  # characters of an unknown field in a message
_logger = logging.getLogger(__name__)
_PATH = re.compile(r" - at (?:`key` in )?`\$\.(?P<path>.*)`$")
_STEP = re.compile(r"\[(?P<index>\d+)\]|(?P<name>[^.\[]+)")


@dataclass(frozen=True, slots=True)
class Neutral:
    """Status of a field that other servers use and that has no effect here."""

    reason: str


@dataclass(frozen=True, slots=True)
class Refused:
    """Status of a field that asks for a feature which this server lacks. The error ends with
    `remedy`.

    unless: values that do not ask for the feature. If empty, null, false, "" and lists and objects
        of such values do not ask for it.
    """

    remedy: str
    unless: tuple[Any, ...]

    @property
    def harmless(self) -> str:
        """Return the values besides null that do not ask for the feature, in words."""
        return " or ".join(map(json.dumps, self.unless)) or "false or empty"

    def takes(self, value: Any) -> bool:
        """Return whether `value` is accepted because it does not ask for the feature."""
        if self.unless:
            return any(type(value) is type(each) and value == each for each in self.unless)
        return _asks_nothing(value)


def neutral(reason: str) -> msgspec.Meta:
    """Return the annotation of a field without effect. `reason` says why it has none."""
    return msgspec.Meta(description=f"Changes nothing: {reason}", extra={_STATUS: Neutral(reason)})


def refused(remedy: str, *unless: Any) -> msgspec.Meta:
    """Return the annotation of a refused field. The arguments are the fields of Refused."""
    status = Refused(remedy, unless)
    return msgspec.Meta(
        description=f"Refused, unless it is null, {status.harmless}: {remedy}",
        extra={_STATUS: status},
    )


class Fields(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Base class of structs that decode a request's body or query. A field has an effect unless its
    annotation is `neutral(...)` or `refused(...)`. Construction raises ApiError, which names the
    field, if a refused field asks for its feature."""

    def __post_init__(self) -> None:
        for name, status in _refused_of(type(self)):
            value = getattr(self, name)
            if value is not None and not status.takes(value):
                shown = reprlib.repr(value)
                raise ApiError(400, f"{name}={shown} is not served: {status.remedy}", param=name)


class NoFields(Fields):
    """A body or query without fields."""


def statuses(kind: type[Fields]) -> dict[str, Neutral | Refused | None]:
    """Return the status of each field of `kind`. The status of a field with an effect is None."""
    hints = typing.get_type_hints(kind, include_extras=True)
    return {name: _status_of(hints[name]) for name in kind.__struct_fields__}


@cache
def nested(kind: type[Fields]) -> dict[str, type[Fields]]:
    """Return the inner struct of each field of `kind` that holds a struct or a list of structs."""
    hints = typing.get_type_hints(kind)
    found = {name: next(_structs_in(hints[name]), None) for name in kind.__struct_fields__}
    return {name: struct for name, struct in found.items() if struct is not None}


def converted(
    given: Any, kind: type[Fields], *, ignores_unknown: bool, strict: bool = True
) -> Fields:
    """Return `given`, decoded JSON or a query, as `kind`.

    ignores_unknown: whether fields that `kind` lacks are ignored. Each is logged once.
    strict: whether numbers and booleans must not be written as text.

    Raises ApiError, which names the field, for a value of a wrong type and for a refused feature.
    It is also raised for an unknown field that resembles a field of `kind` or is not ignored.
    """
    with suppress(msgspec.ValidationError):  # most requests have no unknown field
        return msgspec.convert(given, kind, strict=strict, str_keys=True)
    known = _known_part(given, kind, "", _paths_by_name(kind), ignores_unknown)
    try:
        return msgspec.convert(known, kind, strict=strict, str_keys=True)
    except msgspec.ValidationError as fault:
        raise unreadable_value(fault, known) from None


@cache
def _paths_by_name(kind: type[Fields]) -> Mapping[str, str]:
    return {path.rpartition(".")[2]: path for path in _paths(kind)}


def _known_part(
    given: Any, kind: type[Fields], above: str, paths: Mapping[str, str], ignores_unknown: bool
) -> Any:
    """Return `given` without unknown fields at any depth. `above` is the path of `given` with a
    final dot."""
    if isinstance(given, list):
        return [_known_part(each, kind, above, paths, ignores_unknown) for each in given]
    if not isinstance(given, Mapping):
        return given
    inner = nested(kind)
    known = {}
    for key, value in given.items():
        if key in kind.__struct_fields__:
            if key in inner:
                within = f"{above}{key}."
                value = _known_part(value, inner[key], within, paths, ignores_unknown)
            known[key] = value
            continue
        path = f"{above}{key}"[:_MAX_SHOWN]
        nearest = _nearest(key, kind, above, paths)
        if nearest is not None or not ignores_unknown:
            hint = f"the nearest is {nearest}" if nearest else "GET /openapi.json lists all"
            raise ApiError(400, f"{path} is not a field of this request; {hint}", param=path)
        _warn_once(kind.__name__, path)
    return known


def _nearest(key: str, kind: type[Fields], above: str, paths: Mapping[str, str]) -> str | None:
    """Return the path of the field whose name resembles `key`, or None. Prefers fields of `kind`
    itself."""
    known = {**paths, **{name: above + name for name in kind.__struct_fields__}}
    nearest = difflib.get_close_matches(key, known, 1, _TYPO_CUTOFF)
    return known[nearest[0]] if nearest else None


@lru_cache(_NUM_WARNINGS)
def _warn_once(kind: str, path: str) -> None:
    _logger.warning("%s: the field %s is unknown and ignored", kind, path)


def unreadable_value(fault: msgspec.ValidationError, given: Any) -> ApiError:
    """Return the error for a value of a wrong type. `given` is the decoded request, from which the
    error quotes the value, or None if it is not JSON."""
    match = _PATH.search(str(fault))
    if match is None:
        return ApiError(400, f"the request cannot be read: {fault}")
    path = match["path"].partition("[...]")[0]  # msgspec does not name the key of an entry
    if given is None:
        return ApiError(400, f"the request cannot be read: {fault}", param=path)
    value = given
    for step in _STEP.finditer(path):
        value = value[step["name"] if step["index"] is None else int(step["index"])]
    return ApiError(400, f"{path}={reprlib.repr(value)} cannot be read: {fault}", param=path)


def _asks_nothing(value: Any) -> bool:
    if isinstance(value, list | dict):
        return all(map(_asks_nothing, value.values() if isinstance(value, dict) else value))
    return value is None or value is False or value == ""


def _status_of(hint: Any) -> Neutral | Refused | None:
    for each in getattr(hint, "__metadata__", ()):
        if isinstance(each, msgspec.Meta) and each.extra is not None:
            status = each.extra[_STATUS]
            assert isinstance(status, Neutral | Refused)
            return status
    return None


@cache
def _refused_of(kind: type[Fields]) -> tuple[tuple[str, Refused], ...]:
    pairs = statuses(kind).items()
    return tuple((name, status) for name, status in pairs if isinstance(status, Refused))


def _structs_in(hint: Any) -> Iterator[type[Fields]]:
    if isinstance(hint, type) and issubclass(hint, Fields):
        yield hint
    for each in typing.get_args(hint):
        yield from _structs_in(each)


def _paths(kind: type[Fields], above: str = "") -> Iterator[str]:
    """Yield the paths of all fields that are not refused, inner fields first."""
    for name, inner in nested(kind).items():
        yield from _paths(inner, f"{above}{name}.")
    for name, status in statuses(kind).items():
        if not isinstance(status, Refused):
            yield above + name
