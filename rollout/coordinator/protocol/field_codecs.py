"""A message's fields to msgpack and back: one routine, directed by the annotations."""

from __future__ import annotations

import dataclasses
import reprlib
import types
import typing
from collections.abc import Mapping
from enum import IntEnum
from functools import cache
from typing import Annotated, Any, TypeVar

import numpy as np
import numpy.typing as npt
from typing_extensions import dataclass_transform

from rollout.coordinator.protocol.class_codecs import ClassCodec, Codec, Function, class_codec
from rollout.coordinator.protocol.field_types import Binary, Bounds, Length, Plain
from rollout.coordinator.protocol.framing import pack
from rollout.errors import ProtocolError

MAX_PLAIN_DEPTH = 8
_ANY_LENGTH = Length(0, 2**32)
_SHORT_BYTES = 4096
T = TypeVar("T")


@dataclass_transform(
    kw_only_default=True,
    frozen_default=True,
    eq_default=False,
    field_specifiers=(dataclasses.field,),
)
def wire_data(cls: type[T]) -> type[T]:
    """Make a dataclass of a WireData. Nobody changes one once it is made; type checkers watch over
    it, since a dataclass that does so itself takes twice as long to be made.
    """
    return dataclasses.dataclass(slots=True, kw_only=True, eq=False)(cls)


class WireData:
    """Base of messages and of their parts: equal if of one type and equal on the wire; no hash."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        return pack(to_fields(self)) == pack(to_fields(other))


def to_fields(instance: WireData) -> list[Any]:
    """Return the fields for msgpack, in order. Raises ProtocolError naming the one at fault."""
    key: Any = type(instance)  # mypy takes no class for hashable
    fields: list[Any] = class_codec_of(key).write(instance)
    return fields


@cache
def class_codec_of(cls: type[Any], header: int | None = None) -> ClassCodec:
    """Return the codec of a dataclass, with a header before its fields or without.

    Raises TypeError if an annotation says too little.
    """
    hints = typing.get_type_hints(cls, include_extras=True)
    codecs = {field.name: codec_of(hints[field.name]) for field in dataclasses.fields(cls)}
    return class_codec(cls, codecs, header)


def codec_of(hint: Any) -> Codec:
    """Return the codec of an annotation. Raises TypeError if no field can have it."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        return _annotated_codec(args[0], args[1])
    if origin in (typing.Union, types.UnionType):
        return _union_codec(args)
    if origin is tuple and args[1:] == (Ellipsis,):
        return _tuple_codec(codec_of(args[0]), _ANY_LENGTH)
    if isinstance(origin, type) and issubclass(origin, Mapping) and args[0] is str:
        return _map_codec(codec_of(args[1]))
    if isinstance(hint, type) and issubclass(hint, IntEnum):
        return _enum_codec(hint)
    if isinstance(hint, type) and issubclass(hint, WireData):
        return _part_codec(hint)
    if hint in (bool, str, bytes):
        return _same_both_ways(_typed(hint), f"type({{v}}) is {hint.__name__}")
    raise TypeError(f"no field of a message can be a {hint!r}")


def _annotated_codec(hint: Any, rule: Any) -> Codec:
    if isinstance(rule, Binary):
        return _array_codec(np.dtype(rule.dtype), rule.low)
    if isinstance(rule, Plain):
        return _same_both_ways(_plain_map)
    if isinstance(rule, Bounds) and hint in (int, float):
        unchanged = f"type({{v}}) is {hint.__name__} and {rule.low!r} <= {{v}} <= {rule.high!r}"
        return _same_both_ways(_number(hint, rule), unchanged)
    if isinstance(rule, Length) and hint in (str, bytes):
        unchanged = f"type({{v}}) is {hint.__name__} and {rule.low} <= len({{v}}) <= {rule.high}"
        return _same_both_ways(_typed(hint, rule), unchanged)
    if isinstance(rule, Length) and typing.get_origin(hint) is tuple:
        return _tuple_codec(codec_of(typing.get_args(hint)[0]), rule)
    raise TypeError(f"{rule!r} says nothing about a {hint!r}")


def _union_codec(hints: tuple[Any, ...]) -> Codec:
    """`X | None`, or text | array."""
    codecs = [codec_of(hint) for hint in hints if hint is not types.NoneType]
    if types.NoneType in hints and len(codecs) == 1:
        return dataclasses.replace(codecs[0], is_optional=True)
    if hints[0] is str and len(codecs) == 2:
        return dataclasses.replace(codecs[1], unchanged=codecs[0].unchanged)
    raise TypeError(f"no field of a message can be one of {hints}")


def _same_both_ways(check: Function, unchanged: str = "False") -> Codec:
    return Codec(check, check, unchanged=unchanged)


def _number(number_type: type[int] | type[float], bounds: Bounds) -> Function:
    low, high = bounds.low, bounds.high

    def check(value: Any) -> Any:
        # bool is an int to Python; an int is a float on the wire of a peer that wrote 5.
        if type(value) is not number_type:
            if number_type is int or type(value) is not int:
                raise ProtocolError(f"expected {number_type.__name__}, got {_show(value)}")
            value = float(value)
        if not low <= value <= high:
            raise ProtocolError(f"{_show(value)} is not in [{low}, {high}]")
        return value

    return check


def _typed(value_type: type[Any], length: Length | None = None) -> Function:
    def check(value: Any) -> Any:
        if type(value) is not value_type:
            raise ProtocolError(f"expected {value_type.__name__}, got {_show(value)}")
        if length is not None and not length.low <= len(value) <= length.high:
            raise ProtocolError(f"its length {len(value)} is not in [{length.low}, {length.high}]")
        return value

    return check


def _enum_codec(enum: type[IntEnum]) -> Codec:
    def read(value: Any) -> IntEnum:
        try:
            return enum(value)
        except ValueError as fault:
            raise ProtocolError(f"expected {enum.__name__}, got {_show(value)}") from fault

    return Codec(lambda value: int(read(value)), read)


def _part_codec(part_type: type[WireData]) -> Codec:
    key: Any = part_type
    codec = class_codec_of(key)
    return Codec(codec.write, codec.read)


def _tuple_codec(item: Codec, length: Length) -> Codec:
    low, high = length.low, length.high

    def check(values: Any) -> None:
        if not isinstance(values, (list, tuple)):
            raise ProtocolError(f"expected a list, got {_show(values)}")
        if not low <= len(values) <= high:
            raise ProtocolError(f"its length {len(values)} is not in [{low}, {high}]")

    def write(values: Any) -> list[Any]:
        check(values)
        return list(map(item.write, values))

    def read(values: Any) -> tuple[Any, ...]:
        check(values)
        return tuple(map(item.read, values))

    return Codec(write, read)


def _map_codec(item: Codec) -> Codec:
    def each(function: Function, values: Any) -> dict[str, Any]:
        if not isinstance(values, Mapping) or not all(type(key) is str for key in values):
            raise ProtocolError(f"expected a map with string keys, got {_show(values)}")
        return {key: function(value) for key, value in values.items()}

    return Codec(lambda values: each(item.write, values), lambda values: each(item.read, values))


def _array_codec(dtype: np.dtype[Any], low: int | None) -> Codec:
    itemsize = dtype.itemsize

    def check(array_N: npt.NDArray[Any], encoded: bytes | None) -> None:
        """`encoded`: None of a long one."""
        # Of little-endian numbers that are not negative each last byte is below 128: NumPy's
        # minimum of a few takes longer than all else that is done for a message.
        if low == 0 and encoded is not None and encoded[itemsize - 1 :: itemsize].isascii():
            return
        if low is not None and len(array_N) and np.minimum.reduce(array_N) < low:
            raise ProtocolError(f"holds {array_N.min()}, which is below {low}")

    def write(value: Any) -> bytes | memoryview:
        array_N = _as_array(value, dtype)
        encoded = array_N.tobytes() if array_N.nbytes <= _SHORT_BYTES else None
        check(array_N, encoded)
        return array_N.data if encoded is None else encoded

    def read(encoded: Any) -> npt.NDArray[Any]:
        if type(encoded) is not bytes or len(encoded) % itemsize:
            raise ProtocolError(f"expected {itemsize}-byte numbers, got {_show(encoded)}")
        array_N = np.frombuffer(encoded, dtype=dtype)
        check(array_N, encoded if len(encoded) <= _SHORT_BYTES else None)
        return array_N

    return Codec(write, read)


def _as_array(value: Any, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """Return `value` as contiguous [n] of `dtype`, without a copy if it is one. Nothing wraps."""
    if type(value) is np.ndarray and value.dtype == dtype and value.ndim == 1:
        return np.ascontiguousarray(value)
    array_N = np.asarray(value)
    if array_N.ndim != 1:
        raise ProtocolError(f"expected one dimension, got the shape {array_N.shape}")
    if array_N.dtype != dtype and array_N.size:
        if array_N.dtype.kind not in ("iu" if dtype.kind == "i" else "iuf"):
            raise ProtocolError(f"expected {dtype.name}, got {array_N.dtype.name}")
        if dtype.kind == "i" and (array_N.astype(dtype) != array_N).any():
            raise ProtocolError(f"holds numbers that do not fit {dtype.name}")
    return np.ascontiguousarray(array_N, dtype=dtype)


def _plain_map(value: Any) -> Any:
    if not isinstance(value, Mapping):
        raise ProtocolError(f"expected a map, got {_show(value)}")
    _check_plain(value, MAX_PLAIN_DEPTH)
    return value


def _check_plain(value: Any, depth_left: int) -> None:
    if value is None or type(value) in (bool, int, float, str, bytes):
        return
    if depth_left == 0:
        raise ProtocolError(f"nested deeper than {MAX_PLAIN_DEPTH}")
    if isinstance(value, Mapping):
        for key, item in value.items():
            if type(key) is not str:
                raise ProtocolError(f"a map's key is {_show(key)}, not a string")
            _check_plain(item, depth_left - 1)
    elif isinstance(value, (list, tuple)):
        for item in value:
            _check_plain(item, depth_left - 1)
    else:
        raise ProtocolError(f"{_show(value)} is no plain value")


def _show(value: Any) -> str:
    """Return the type of a value, and a number or the beginning of a string, for an error."""
    shown = f" {reprlib.repr(value)}" if isinstance(value, (bool, int, float, str)) else ""
    return type(value).__name__ + shown
