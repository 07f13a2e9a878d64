"""TOKEN_COLUMNS: the values that a request has per token, and how they are held in memory.

`rollout.requests` (records, token runs), `rollout.engine` (input and output processor) and
`rollout.coordinator.protocol.packed` loop over this list. To add a column, add an entry here, the
fields that it names in DynamicInferenceRequest, TokenRun and TokenRuns, and the lines of
OutputProcessor that compute it.

An engine appends to `array.array`. A request that leaves an engine, or that another process sends,
holds NumPy arrays. An array becomes a list when its field is read.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar, get_args

import numpy as np
import numpy.typing as npt

from rollout.sampling_params import SamplingParams

T = TypeVar("T", bound="ColumnStore")
Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenColumn:
    """A value that a request has for each generated token.

    field: the column's field in DynamicInferenceRequest.
    run_field: the column's field in TokenRun and TokenRuns; "" if the column is not reported while
        the request runs.
    typecode: type of the `array.array` to which an engine appends; "" for a list of dictionaries
        {token id: log-prob}.
    wanted_by: the field of SamplingParams that asks for the column; "" if every request has it.
    placeholder: a tuple with the substitute for missing values in a merged request; () if missing
        values are left out.
    prompt_field: the field in DynamicInferenceRequest with the same value for prompt tokens; "" if
        there is no such field.
    """

    field: str
    run_field: str = ""
    typecode: str = ""
    wanted_by: str = ""
    placeholder: tuple[Any, ...] = ()
    prompt_field: str = ""

    def new(self) -> Any:
        """Return an empty array or list, to which an engine appends."""
        return array(self.typecode) if self.typecode else []

    def is_wanted(self, params: SamplingParams) -> bool:
        """Return whether a request with these parameters has the column."""
        return not self.wanted_by or bool(getattr(params, self.wanted_by))


TOKEN_COLUMNS = (
    TokenColumn(field="generated_tokens", run_field="token_ids", typecode="i"),
    TokenColumn(
        field="generated_log_probs",
        run_field="log_probs",
        typecode="f",
        wanted_by="return_log_probs",
        placeholder=(math.nan,),
        prompt_field="prompt_log_probs",
    ),
    TokenColumn(
        field="generated_ranks",
        run_field="ranks",
        typecode="i",
        wanted_by="return_ranks",
        placeholder=(0,),
        prompt_field="prompt_ranks",
    ),
    TokenColumn(
        field="generated_top_n_logprobs",
        run_field="top_n",
        wanted_by="top_n_logprobs",
        placeholder=(None,),
        prompt_field="prompt_top_n_logprobs",
    ),
    TokenColumn(field="tpot", typecode="d", placeholder=(math.nan,)),
    TokenColumn(field="context_kv_version_min", run_field="context_kv_version_min", typecode="i"),
    TokenColumn(field="context_kv_version_mean", run_field="context_kv_version_mean", typecode="d"),
)
REQUESTED_COLUMNS = tuple(column for column in TOKEN_COLUMNS if column.wanted_by)
PROMPT_FIELDS = tuple(column.prompt_field for column in TOKEN_COLUMNS if column.prompt_field)


def _fields(*, are_numbers: bool) -> tuple[str, ...]:
    """Return the fields that hold numbers, or the fields that hold dictionaries, per token."""
    columns = [column for column in TOKEN_COLUMNS if bool(column.typecode) is are_numbers]
    names = [name for column in columns for name in (column.field, column.prompt_field)]
    return tuple(name for name in names if name)


ARRAY_FIELDS = _fields(are_numbers=True)
TOP_N_FIELDS = _fields(are_numbers=False)
ArrayType = Literal["<i4", "<i8", "<f4", "<f8"]
_TYPES: tuple[str, ...] = get_args(ArrayType)
if TYPE_CHECKING:
    ArrayField = str
    TopNField = str
else:
    ArrayField = Literal[ARRAY_FIELDS]
    TopNField = Literal[TOP_N_FIELDS]


class _ListWhenRead:
    """Descriptor of a field that is held as an array until it is first read. The first read stores
    a list as the request's own attribute. Python finds this attribute before the descriptor, which
    has no `__set__`."""

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
    """Let instances of the dataclass `cls` hold their ARRAY_FIELDS as arrays until they are
    read."""
    for name in ARRAY_FIELDS:
        setattr(cls, name, _ListWhenRead(name))
    return cls


class ColumnStore:
    """Base of DynamicInferenceRequest. It holds the arrays of fields that were not read as lists
    yet. Copies of a request share the arrays, which are never changed."""

    # Each instance with arrays replaces it.
    _columns: ClassVar[Mapping[str, Array]] = MappingProxyType({})

    def column(self, name: str) -> Any:
        """Return the values of field `name` as they are held: an array, list, tensor or None."""
        stored = vars(self)
        return stored[name] if name in stored else self._columns[name]

    def hold_arrays(self) -> None:
        """Move fields that are arrays to the columns, from which the first read makes lists. An
        `array.array`, which may still grow, is copied."""
        stored, taken = vars(self), {}
        for name in ARRAY_FIELDS:
            values = stored.get(name)
            if isinstance(values, (np.ndarray, array)):
                column = np.array(values) if isinstance(values, array) else values
                if column.ndim == 1 and column.dtype.str in _TYPES:
                    taken[name] = column
                    del stored[name]
        if taken:
            stored["_columns"] = {**self._columns, **taken}


def as_array(values: Any) -> Array | None:
    """Return a list or array of numbers as an array of an ArrayType; None if no ArrayType fits."""
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
