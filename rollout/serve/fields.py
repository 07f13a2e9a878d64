"""Fields of requests: each is served, neutral, or refused by name."""

from __future__ import annotations

import difflib
import json
import re
import reprlib
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import msgspec

from rollout.serve.errors import ApiError

_STATUS = "status"  # of a field, in its Meta
_UNKNOWN = re.compile(r"Object contains unknown field `(?P<key>.*?)`(?: - at `\$\.?(?P<at>.*)`)?$")
_INDEX = re.compile(r"\[.*?\]")


@dataclass(frozen=True, slots=True)
class Neutral:
    """A field that other servers read and that changes nothing here, whatever its value."""

    reason: str


@dataclass(frozen=True, slots=True)
class Refused:
    """A field that asks for what is not served. `unless`: values that ask for nothing; without them
    null, false, empty ones and lists of those do."""

    remedy: str
    unless: tuple[Any, ...]

    @property
    def harmless(self) -> str:
        """The values that ask for nothing beside null, as JSON."""
        return " or ".join(map(json.dumps, self.unless)) or "false or empty"

    def takes(self, value: Any) -> bool:
        """Whether `value` asks for nothing, so that the field may be sent with it."""
        if self.unless:
            return any(type(value) is type(each) and value == each for each in self.unless)
        return _asks_nothing(value)


def neutral(reason: str) -> msgspec.Meta:
    """Annotate a field that changes nothing, for this reason."""
    return msgspec.Meta(description=f"Changes nothing: {reason}", extra={_STATUS: Neutral(reason)})


def refused(remedy: str, *unless: Any) -> msgspec.Meta:
    """Annotate a field that is answered by 400 and the remedy; see Refused."""
    status = Refused(remedy, unless)
    return msgspec.Meta(
        description=f"Refused, unless it is null, {status.harmless}: {remedy}",
        extra={_STATUS: status},
    )


class Fields(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Base of what is decoded from a request: an object of a body, or the query. null is absent
    where a field takes it.

    A field without a status is served. Raises ApiError, which names a refused field.
    """

    def __post_init__(self) -> None:
        for name, status in _refused_of(type(self)):
            value = getattr(self, name)
            if value is not None and not status.takes(value):
                shown = reprlib.repr(value)
                raise ApiError(400, f"{name}={shown} is not served: {status.remedy}", param=name)


class NoFields(Fields):
    """A body, or a query, without any field."""


def statuses(kind: type[Fields]) -> dict[str, Neutral | Refused | None]:
    """Return the status of each field of `kind`; None for those that are served."""
    hints = typing.get_type_hints(kind, include_extras=True)
    return {name: _status_of(hints[name]) for name in kind.__struct_fields__}


def nested(kind: type[Fields]) -> dict[str, type[Fields]]:
    """Return the objects inside of `kind`, by the fields that hold them."""
    hints = typing.get_type_hints(kind)
    found = {name: next(_structs_in(hints[name]), None) for name in kind.__struct_fields__}
    return {name: struct for name, struct in found.items() if struct is not None}


def unknown_field(fault: msgspec.ValidationError, kind: type[Fields]) -> ApiError | None:
    """Return the error for a field that `kind` does not have, with the nearest that it has; None if
    `fault` is about something else."""
    match = _UNKNOWN.search(str(fault))
    if match is None:
        return None
    key, at = match["key"], _INDEX.sub("", match["at"] or "")
    place = f"{at}.{key}" if at else key
    paths = sorted(_places(kind), key=lambda path: path.rpartition(".")[0] == at)
    places = {path.rpartition(".")[2]: path for path in paths}  # those beside it go first
    nearest = difflib.get_close_matches(key, places, 1)
    hint = f"the nearest is {places[nearest[0]]}" if nearest else "GET /openapi.json lists all"
    return ApiError(400, f"{place:.80} is no field of this request; {hint}", param=place[:80])


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


def _places(kind: type[Fields], above: str = "") -> Iterator[str]:
    """Yield the paths of all fields that are not refused, those of outer objects last."""
    for name, inner in nested(kind).items():
        yield from _places(inner, f"{above}{name}.")
    for name, status in statuses(kind).items():
        if not isinstance(status, Refused):
            yield above + name
