"""Base classes and field types of the structs that processes send each other.

`pack` and `unpack` convert values to msgpack. Used by `rollout.control.commands`,
`rollout.requests.token_runs`, `rollout.weights.source`, `rollout.coordinator` and
`rollout.cli.coordinator`. No state is kept.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any, get_args, get_type_hints

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Meta

from rollout.errors import ProtocolError
from rollout.ranges import MAX_SECONDS

DEFAULT_MAX_FRAME_BYTES = 64 * 2**20
# The size of plain values is bounded, in messages with a PlainMap and in `unpack`, because a plain
# value takes up to 85 bytes of memory per byte received: an empty map is one byte. All other fields
# are typed. msgspec refuses a length above the field's bound, or above the bytes received, before
# it builds anything.
MAX_PLAIN_BYTES = 2**20
MAX_PLAIN_DEPTH = 8
MAX_ITEMS = 2**17
# Exceptions that msgspec raises for bad data; malformed UTF-8 is a ValueError.
FAULTS = (msgspec.MsgspecError, ValueError, TypeError, OverflowError, RecursionError)

Count = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Int = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
Seed = Annotated[int, Meta(ge=-(2**63))]  # msgpack has no integer above 2**64 - 1
Version = Annotated[int, Meta(ge=-(2**31) + 1, le=2**31 - 1)]
Seconds = Annotated[float, Meta(ge=0.0, le=MAX_SECONDS)]  # the bounds exclude NaN
Uuid = Annotated[bytes, Meta(min_length=16, max_length=16)]
Name = Annotated[str, Meta(max_length=1024)]
# Values are None, bool, int, float, str, bytes, lists, and maps with string keys, nested.
PlainMap = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Column:
    """The number format of a column, which is little-endian. `is_signed` allows numbers below 0."""

    dtype: np.dtype[Any]
    is_signed: bool

    def read(self, packed: bytes) -> npt.NDArray[Any]:
        """Return a read-only view of received bytes. Raises ProtocolError for a wrong length or a
        forbidden sign."""
        itemsize = self.dtype.itemsize
        if len(packed) % itemsize:
            raise ProtocolError(f"{len(packed)} bytes are not a multiple of {itemsize}")
        array_N = np.frombuffer(packed, self.dtype)
        # The last byte of a non-negative little-endian number is below 128. NumPy's minimum of a
        # few numbers would take longer than the rest of a message.
        if not self.is_signed and not packed[itemsize - 1 :: itemsize].isascii():
            raise ProtocolError(f"holds {array_N.min()}, which is below 0")
        return array_N

    def convert(self, values: Any) -> npt.NDArray[Any]:
        """Return a sender's numbers as an array of the dtype. An array that already has the dtype
        is not checked further. Raises ProtocolError unless the numbers have one dimension and fit
        the dtype."""
        array_N = np.asarray(values)
        if array_N.ndim != 1:
            raise ProtocolError(f"expected one dimension, got the shape {array_N.shape}")
        if array_N.dtype != self.dtype and array_N.size:
            is_integer = self.dtype.kind == "i"
            if array_N.dtype.kind not in ("iu" if is_integer else "iuf"):
                raise ProtocolError(f"expected {self.dtype.name}, got {array_N.dtype.name}")
            if is_integer and (array_N.astype(self.dtype) != array_N).any():
                raise ProtocolError(f"holds numbers that do not fit {self.dtype.name}")
            if not self.is_signed and (lowest := array_N.min()) < 0:
                raise ProtocolError(f"holds {lowest}, which is below 0")
        return array_N.astype(self.dtype, copy=False)


def _packed_as(dtype: str, *, is_signed: bool = True) -> Any:
    """Return the type annotation of a column."""
    # As bytes: msgspec refuses any other received value, but of an unknown type it accepts any.
    return Annotated[bytes, Meta(extra={"column": Column(np.dtype(dtype), is_signed)})]


# One-dimensional arrays, received as bytes, which the struct's constructor converts to arrays.
if TYPE_CHECKING:
    Flags = npt.NDArray[np.uint8]
    Int32s = npt.NDArray[np.int32]
    TokenIds = npt.NDArray[np.int32]
    Ids = npt.NDArray[np.int64]
    Float32s = npt.NDArray[np.float32]
    Float64s = npt.NDArray[np.float64]
else:
    Flags = _packed_as("u1")
    Int32s = _packed_as("<i4")
    TokenIds = _packed_as("<i4", is_signed=False)  # also counts and ranks
    Ids = _packed_as("<i8", is_signed=False)
    Float32s = _packed_as("<f4")
    Float64s = _packed_as("<f8")


class WireData(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, eq=False):
    """Base of messages and of structs in messages. Two objects are equal if their types and packed
    bytes are equal. They are not hashable."""

    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        return pack(self) == pack(other)


class Message(WireData, frozen=True):
    """Base of messages. A message is sent as one frame: an array that begins with the tag of its
    class."""


class WithColumns(WireData, frozen=True):
    """Base of structs with columns. Senders pass numbers, and receivers pass the received bytes."""

    def __post_init__(self) -> None:
        """Convert all columns that are not None to arrays. Raises ProtocolError, which names the
        field."""
        for name, column in columns_of(type(self)).items():
            value = getattr(self, name)
            if value is None:
                continue
            try:
                if type(value) is bytes:
                    value = column.read(value)
                elif type(value) is np.ndarray and value.dtype is column.dtype and value.ndim == 1:
                    continue
                else:
                    value = column.convert(value)
            except ProtocolError as fault:
                raise ProtocolError(f"{type(self).__name__}.{name}: {fault}") from fault
            msgspec.structs.force_setattr(self, name, value)


@cache
def columns_of(cls: type[WithColumns]) -> Mapping[str, Column]:
    """Return the format of each column of a struct, by the field's name."""
    found: dict[str, Column] = {}
    for name, hint in get_type_hints(cls, include_extras=True).items():
        for annotation in (hint, *get_args(hint)):  # also the parts of `Float32s | None`
            for rule in getattr(annotation, "__metadata__", ()):
                if rule.extra is not None:
                    found[name] = rule.extra["column"]
    return found


def check_plain(name: str, value: Any) -> None:
    """Raise ProtocolError unless the field's `value` consists of plain values (see `PlainMap`).
    Also raise it for nesting deeper than MAX_PLAIN_DEPTH. The message names the field by `name`."""
    pending = [(value, MAX_PLAIN_DEPTH)]
    while pending:
        value, depth_left = pending.pop()
        if value is None or type(value) in (bool, int, float, str, bytes):
            continue
        if not isinstance(value, (Mapping, list, tuple)):
            raise ProtocolError(f"{name}: {type(value).__name__} is not a plain value")
        if depth_left == 0:
            raise ProtocolError(f"{name}: nested deeper than {MAX_PLAIN_DEPTH}")
        items: Iterable[Any] = value
        if isinstance(value, Mapping):
            for key in value:
                if type(key) is not str:
                    raise ProtocolError(f"{name}: a map's key is {type(key).__name__}, not str")
            items = value.values()
        pending += [(item, depth_left - 1) for item in items]


def pack(value: Any) -> bytes:
    """Return a value or message as msgpack. Raises ProtocolError for a type that msgpack lacks."""
    try:
        return _encoder.encode(value)
    except FAULTS as fault:
        raise ProtocolError(f"cannot be sent: {fault}") from fault


def unpack(packed: bytes | msgspec.Raw, max_bytes: int = MAX_PLAIN_BYTES) -> Any:
    """Return the plain value in `packed`. Raises ProtocolError if `packed` is malformed or longer
    than `max_bytes`."""
    num_bytes = memoryview(packed).nbytes
    if num_bytes > max_bytes:
        raise ProtocolError(f"{num_bytes} bytes of plain values; at most {max_bytes} are allowed")
    try:
        return msgspec.msgpack.decode(packed)
    except FAULTS as fault:
        raise ProtocolError(f"not a msgpack value: {fault!s:.200}") from fault


def _built_in(value: Any) -> Any:
    if type(value) is np.ndarray:
        return value.tobytes()
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"{type(value).__name__} cannot be part of a message")


assert sys.byteorder == "little", "columns are sent as they lie in memory"
_encoder = msgspec.msgpack.Encoder(enc_hook=_built_in)
