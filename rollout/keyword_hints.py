"""Keywords that vLLM, SGLang and TRL have for a setting: the error says what it is called here."""

from __future__ import annotations

import functools
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
