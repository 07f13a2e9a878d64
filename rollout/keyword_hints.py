"""Other names of keywords: those of vLLM, SGLang and TRL, and those of older versions."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

T = TypeVar("T")


def hint_of(name: str, value: Any, hints: Mapping[str, str]) -> str:
    """The message for a keyword that stands in `hints`."""
    return f"{name}={value!r} is unknown; {name} is {hints[name]} here"


def refuses_with_hints(
    hints: Mapping[str, str], error: type[Exception]
) -> Callable[[type[T]], type[T]]:
    """A class decorator: a keyword that stands in `hints` raises `error` with our name for it."""

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
