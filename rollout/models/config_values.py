"""Kinds of values that config keys can have, and checks of integers and numbers.

Used by `rollout.models.config_keys` and `rollout.models.rope_config`. A bool is not a number here,
because JSON tells true, 1 and 1.0 apart.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeGuard

MAX_INTEGER = 2**31 - 1
MAX_FLOAT = sys.float_info.max


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of value. `name` describes it in errors. `accepts` returns whether a value is of this
    kind."""

    name: str
    accepts: Callable[[Any], bool]

    @property
    def or_null(self) -> Kind:
        accepts = self.accepts
        return Kind(f"{self.name}, or null", lambda value: value is None or accepts(value))


def is_integer(value: object, least: int = 0) -> TypeGuard[int]:
    """Return whether `value` is an integer from `least` to `MAX_INTEGER`, but not a bool."""
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= MAX_INTEGER


def is_number(value: object) -> TypeGuard[float]:
    """Return whether `value` is a number within the range of a float, but not a bool."""
    is_bool = isinstance(value, bool)
    return isinstance(value, int | float) and not is_bool and -MAX_FLOAT <= value <= MAX_FLOAT


def _is_list(value: object, accepts: Callable[[Any], bool]) -> bool:
    return isinstance(value, list | tuple) and all(map(accepts, value))


SIZE = Kind("a positive integer below 2^31", lambda value: is_integer(value, 1))
COUNT = Kind("an integer from 0 and below 2^31", is_integer)
NUMBER = Kind("a number", is_number)
POSITIVE = Kind("a positive number", lambda value: is_number(value) and value > 0)
EPSILON = Kind("a number from 0", lambda value: is_number(value) and value >= 0)
FLAG = Kind("true or false", lambda value: isinstance(value, bool))
NAME = Kind("a string", lambda value: isinstance(value, str))
NAMES = Kind("a list of strings", lambda value: _is_list(value, NAME.accepts))
COUNTS = Kind("a list of integers from 0", lambda value: _is_list(value, is_integer))
SWITCHES = Kind("a list of 0 and 1", lambda value: _is_list(value, lambda each: each in (0, 1)))
OBJECT = Kind("an object", lambda value: isinstance(value, Mapping))
ANY = Kind("anything", lambda value: True)  # checked where it is read
