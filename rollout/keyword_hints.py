"""Error messages for settings with unknown names, and decorators that accept former names.

Used by config classes (`rollout.config`, `rollout.sampling_params`, `rollout.serve.config`,
`trainer_hooks.losses.config`, `trainer_hooks.update`) and by modules that read settings by name
(`rollout.cli`, `rollout.apis.arguments`, `rollout.apis.engines`, `trainer_hooks.train`).
"""

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
    """Return the type of each field that the constructor of the dataclass `kind` takes, by name."""
    hints = typing.get_type_hints(kind)
    return {field.name: hints[field.name] for field in dataclasses.fields(kind) if field.init}


def is_union(kind: Any) -> bool:
    """Return whether the type `kind` is a union, X | Y or Optional[X]."""
    return typing.get_origin(kind) in (typing.Union, types.UnionType)


def remedy_of_unknown(
    name: str, known: Iterable[str], otherwise: str, *, cutoff: float, prefix: str = ""
) -> str:
    """Return "did you mean X?" with the known name that is most similar to `name`. Returns
    `otherwise` if no name is similar enough. `cutoff` is the least similarity, from 0 to 1, as in
    difflib. `prefix` is put before the known name."""
    nearest = difflib.get_close_matches(name, list(known), n=1, cutoff=cutoff)
    return f"did you mean {prefix}{nearest[0]}?" if nearest else otherwise


def hint_of(name: str, value: Any, hints: Mapping[str, str]) -> str:
    """Return the error message for `name`, a keyword of another system. `hints` maps such keywords
    to ours, and contains `name`."""
    return f"{name}={value!r} is unknown; {name} is {hints[name]} here"


def refuses_with_hints(
    hints: Mapping[str, str], error: type[Exception]
) -> Callable[[type[T]], type[T]]:
    """Return a decorator of dataclasses whose constructor explains unknown keywords. The
    constructor raises `error` with `hint_of` for keywords in `hints`. For other unknown keywords it
    raises TypeError with the most similar field."""

    def decorate(kind: type[T]) -> type[T]:
        init = kind.__init__
        known = {field.name for field in dataclasses.fields(kind) if field.init}  # type: ignore[arg-type]

        @functools.wraps(init)
        def checked(self: T, *args: Any, **keywords: Any) -> None:
            for name in keywords.keys() - known:
                if name in hints:
                    raise error(hint_of(name, keywords[name], hints))
                otherwise = f"see the fields of {kind.__name__}"
                remedy = remedy_of_unknown(name, sorted(known), otherwise, cutoff=0.6)
                raise TypeError(f"{name}={keywords[name]!r} is unknown; {remedy}")
            init(self, *args, **keywords)

        kind.__init__ = checked  # type: ignore[assignment, method-assign]
        return kind

    return decorate


def renamed_keywords(names: Mapping[str, str]) -> Callable[[type[T]], type[T]]:
    """Return a class decorator that accepts keywords by their former names, with a warning. `names`
    maps former names to current names. A call with both names raises TypeError."""

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
