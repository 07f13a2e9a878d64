"""What messages are made of: bounded fields, columns of numbers, values to bytes and back."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Meta

from rollout.coordinator.protocol.headers import PROTOCOL_VERSION
from rollout.errors import ProtocolError

DEFAULT_MAX_FRAME_BYTES = 64 * 2**20
# What msgspec reads as "any value" costs its reader up to 85 bytes per byte received: an empty map
# is one byte. So whatever holds plain values is bounded: messages with a PlainMap, and what
# `unpack` reads. All other fields are typed, and msgspec refuses a claimed length that is over its
# bound, or not there, before it builds anything.
MAX_PLAIN_BYTES = 2**20
MAX_PLAIN_DEPTH = 8
MAX_ITEMS = 2**17
# What msgspec raises; UTF-8 that is none is a ValueError.
FAULTS = (msgspec.MsgspecError, ValueError, TypeError, OverflowError, RecursionError)

Count = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Int = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
Seed = Annotated[int, Meta(ge=-(2**63))]  # msgpack has no integer above 2**64 - 1
Version = Annotated[int, Meta(ge=-(2**31) + 1, le=2**31 - 1)]
Seconds = Annotated[float, Meta(ge=0.0, le=1e9)]  # no NaN is either
Uuid = Annotated[bytes, Meta(min_length=16, max_length=16)]
Name = Annotated[str, Meta(max_length=1024)]
# Any nest of None, bool, int, float, str, bytes, lists and maps with string keys.
PlainMap = Mapping[str, Any]
# One-dimensional arrays: binary to msgspec, which would build anything for a type it does not know,
# and made arrays by `set_columns`. To type checkers MYPY is true, and they see what readers get.
MYPY = False
if MYPY:
    Flags = npt.NDArray[np.uint8]
    Int32s = npt.NDArray[np.int32]
    Int64s = npt.NDArray[np.int64]
    Float32s = npt.NDArray[np.float32]
    Float64s = npt.NDArray[np.float64]
else:
    Flags = Int32s = Int64s = Float32s = Float64s = bytes


class WireData(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, eq=False):
    """Base of messages and of their parts: equal if of one type and equal on the wire; no hash."""

    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        return pack(self) == pack(other)


@dataclass(frozen=True, slots=True)
class Column:
    """A kind of array: little-endian numbers, negative ones only if `is_signed`."""

    dtype: np.dtype[Any]
    is_signed: bool = True

    def read(self, packed: bytes) -> npt.NDArray[Any]:
        """Return a read-only view of received bytes. Raises ProtocolError."""
        itemsize = self.dtype.itemsize
        if len(packed) % itemsize:
            raise ProtocolError(f"{len(packed)} bytes are no {itemsize}-byte numbers")
        array_N = np.frombuffer(packed, self.dtype)
        # The last byte of a little-endian number that is not negative is below 128: NumPy's
        # minimum of a few numbers takes longer than all else that is done for a message.
        if not self.is_signed and not packed[itemsize - 1 :: itemsize].isascii():
            raise ProtocolError(f"holds {array_N.min()}, which is below 0")
        return array_N

    def convert(self, values: Any) -> npt.NDArray[Any]:
        """Return a sender's numbers as an array of the dtype. Nothing wraps: ProtocolError."""
        array_N = np.asarray(values)
        if array_N.ndim != 1:
            raise ProtocolError(f"expected one dimension, got the shape {array_N.shape}")
        if array_N.dtype != self.dtype and array_N.size:
            is_integer = self.dtype.kind == "i"
            if array_N.dtype.kind not in ("iu" if is_integer else "iuf"):
                raise ProtocolError(f"expected {self.dtype.name}, got {array_N.dtype.name}")
            if is_integer and (array_N.astype(self.dtype) != array_N).any():
                raise ProtocolError(f"holds numbers that do not fit {self.dtype.name}")
        return array_N.astype(self.dtype, copy=False)


TOKEN_IDS = Column(np.dtype("<i4"), is_signed=False)
INT32 = Column(np.dtype("<i4"))
IDS = Column(np.dtype("<i8"), is_signed=False)
FLAGS = Column(np.dtype("u1"))
FLOAT32 = Column(np.dtype("<f4"))
FLOAT64 = Column(np.dtype("<f8"))


def set_columns(message: WireData, columns: Mapping[str, Column]) -> None:
    """Make arrays of a new message's columns, which are received bytes or a sender's numbers.

    Raises ProtocolError naming the field. A sender's numbers are tested for their sign by `encode`,
    which reads what it wrote.
    """
    for name, column in columns.items():
        value = getattr(message, name)
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
            raise ProtocolError(f"{type(message).__name__}.{name}: {fault}") from fault
        msgspec.structs.force_setattr(message, name, value)


def check_plain(name: str, value: Any, depth_left: int = MAX_PLAIN_DEPTH) -> None:
    """Raise ProtocolError unless `value` is of plain values, and nested no deeper than allowed."""
    if value is None or type(value) in (bool, int, float, str, bytes):
        return
    if depth_left == 0:
        raise ProtocolError(f"{name}: nested deeper than {MAX_PLAIN_DEPTH}")
    if isinstance(value, Mapping):
        for key, item in value.items():
            if type(key) is not str:
                raise ProtocolError(f"{name}: a map's key is {type(key).__name__}, not a string")
            check_plain(name, item, depth_left - 1)
    elif isinstance(value, (list, tuple)):
        for item in value:
            check_plain(name, item, depth_left - 1)
    else:
        raise ProtocolError(f"{name}: {type(value).__name__} is no plain value")


def pack(value: Any) -> bytes:
    """Return a value, or a message, as msgpack. Raises ProtocolError if it cannot carry it."""
    try:
        return _encoder.encode(value)
    except FAULTS as fault:
        raise ProtocolError(f"cannot be sent: {fault}") from fault


def unpack(packed: bytes, max_bytes: int = MAX_PLAIN_BYTES) -> Any:
    """Return the one plain value in `packed`. Raises ProtocolError if it is none, or larger."""
    if len(packed) > max_bytes:
        raise ProtocolError(f"{len(packed)} bytes, at most {max_bytes} are allowed")
    try:
        return msgspec.msgpack.decode(packed)
    except FAULTS as fault:
        raise ProtocolError(f"not a msgpack value: {fault!s:.200}") from fault


class ProtocolVersionError(ProtocolError):
    """A handshake in another version of the protocol; to be answered by a Nack that says so."""


class _Handshake(msgspec.Struct, array_like=True):
    """How a Connect or Register begins in every version."""

    header: int
    protocol_version: int


def check_version(frame: bytes | memoryview) -> None:
    """Raise ProtocolVersionError if the first field, which every version has, is another one."""
    try:
        version = _handshake_decoder.decode(frame).protocol_version
    except FAULTS:
        return  # Whatever it is, it is no handshake; the caller's decoder says why.
    if version != PROTOCOL_VERSION:
        raise ProtocolVersionError(
            f"the peer speaks protocol {version}, this process {PROTOCOL_VERSION}"
        )


def _built_in(value: Any) -> Any:
    if type(value) is np.ndarray:
        return value.tobytes()
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"{type(value).__name__} is no value of a message")


assert sys.byteorder == "little", "columns are sent as they lie in memory"
_encoder = msgspec.msgpack.Encoder(enc_hook=_built_in)
_handshake_decoder = msgspec.msgpack.Decoder(_Handshake)
