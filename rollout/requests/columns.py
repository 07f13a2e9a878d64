"""Columns: fields of numbers that are arrays in memory until they are read as lists.

A token takes 4 or 8 bytes in an array, and 32 to 40 in a list. An engine appends to `array.array`;
requests that it hands out, and those from another process, hold NumPy arrays.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar, Literal, TypeVar, get_args

import numpy as np
import numpy.typing as npt

T = TypeVar("T", bound="ColumnStore")
Column = npt.NDArray[Any]

ColumnName = Literal[
    "generated_tokens",
    "generated_log_probs",
    "prompt_log_probs",
    "generated_ranks",
    "prompt_ranks",
    "tpot",
    "context_kv_version_min",
    "context_kv_version_mean",
]
ColumnType = Literal["<i4", "<i8", "<f4", "<f8"]
COLUMNS: tuple[str, ...] = get_args(ColumnName)
_TYPES: tuple[str, ...] = get_args(ColumnType)


class _ListWhenRead:
    """A field that is held as an array, and becomes a list when it is read for the first time.

    From then on the request holds the list, and Python finds it without this descriptor, which has
    no `__set__`.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, request: ColumnStore | None, owner: type) -> list[Any] | None:
        if request is None:
            return None
        if self._name not in request._columns:
            raise AttributeError(f"{owner.__name__} has no {self._name}")
        values: list[Any] = request._columns[self._name].tolist()
        vars(request)[self._name] = values
        return values


def lists_when_read(cls: type[T]) -> type[T]:
    """Let the fields of a dataclass that are COLUMNS be held as arrays."""
    for name in COLUMNS:
        setattr(cls, name, _ListWhenRead(name))
    return cls


class ColumnStore:
    """Holds the arrays of fields that were not read yet. Copies share them; nobody changes them."""

    _columns: ClassVar[Mapping[str, Column]] = MappingProxyType({})  # and of each instance

    def column(self, name: str) -> Any:
        """Return the values of a field as they are held: an array, a list, a tensor or None."""
        stored = vars(self)
        return stored[name] if name in stored else self._columns[name]

    def hold_arrays(self) -> None:
        """Hold the fields that are arrays now as columns; those of `array.array` are copied."""
        stored, taken = vars(self), {}
        for name in COLUMNS:
            values = stored.get(name)
            if isinstance(values, (np.ndarray, array)):
                column = np.array(values) if isinstance(values, array) else values
                if column.ndim == 1 and column.dtype.str in _TYPES:
                    taken[name] = column
                    del stored[name]
        if taken:
            stored["_columns"] = {**self._columns, **taken}


def as_column(values: Any) -> Column | None:
    """Return numbers as an array that gives the same list; None if no type of array does."""
    if isinstance(values, list):
        types = set(map(type, values))
        if types != {int} and types != {float}:
            return None
        values = np.array(values)
        if types == {int} and values.dtype != np.int64:
            return None  # beyond int64 NumPy makes floats, unsigned integers or objects
        if values.dtype == np.int64 and values.min() >= -(2**31) and values.max() < 2**31:
            values = values.astype(np.int32)
    elif isinstance(values, array):
        values = np.asarray(values)
    if not isinstance(values, np.ndarray) or values.ndim != 1 or values.dtype.str not in _TYPES:
        return None
    return values
