"""Names of settings: fields and their types, the nearest name, and names in other systems."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import types
import typing
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

T = TypeVar("T")


def field_types(kind: type) -> dict[str, Any]:
    """Return the type of each field that a dataclass is made from, by name."""
    hints = typing.get_type_hints(kind)
    return {field.name: hints[field.name] for field in dataclasses.fields(kind) if field.init}


def is_union(kind: Any) -> bool:
    """Return whether a type is X | Y."""
    return typing.get_origin(kind) in (typing.Union, types.UnionType)


def remedy_of_unknown(name: str, known: Iterable[str], otherwise: str, *, cutoff: float) -> str:
    """Return a question for the known name nearest to an unknown one, else `otherwise`. `cutoff`:
    least ratio of difflib.
    """
    nearest = difflib.get_close_matches(name, list(known), n=1, cutoff=cutoff)
    return f"did you mean {nearest[0]}?" if nearest else otherwise


def hint_of(name: str, value: Any, hints: Mapping[str, str]) -> str:
    """Return the message for a keyword that stands in `hints`, the names of other systems."""
    return f"{name}={value!r} is unknown; {name} is {hints[name]} here"


def refuses_with_hints(
    hints: Mapping[str, str], error: type[Exception]
) -> Callable[[type[T]], type[T]]:
    """Return a class decorator: a keyword that stands in `hints` raises `error` with our name."""

    def decorate(kind: type[T]) -> type[T]:
        init = kind.__init__

        @functools.wraps(init)
        def checked(self: T, *args: Any, **keywords: Any) -> None:
            for name in hints.keys() & keywords.keys():
                raise error(hint_of(name, keywords[name], hints))
            init(self, *args, **keywords)

        kind.__init__ = checked  # type: ignore[assignment, method-assign]
        return kind

    return decorate


def renamed_keywords(names: Mapping[str, str]) -> Callable[[type[T]], type[T]]:
    """Return a class decorator that takes keywords by their former names, with a warning.

    `names`: former name -> name. Giving both raises TypeError.
    """

    def decorate(kind: type[T]) -> type[T]:
        init = kind.__init__

        @functools.wraps(init)
        def renamed(self: T, *args: Any, **keywords: Any) -> None:
            for former in names.keys() & keywords.keys():
                name = names[former]
                if name in keywords:
                    raise TypeError(f"{former} is the former name of {name}: give {name} alone")
                warnings.warn(
                    f"{former}= is deprecated; write {name}=", DeprecationWarning, stacklevel=2
                )
                keywords[name] = keywords.pop(former)
            init(self, *args, **keywords)

        kind.__init__ = renamed  # type: ignore[assignment, method-assign]
        return kind

    return decorate
