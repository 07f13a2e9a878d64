"""Encodes the fields of requests for msgpack, and decodes them.

Used by `rollout.requests.request`, `rollout.requests.dynamic_request` and
`rollout.requests.record`. `rollout` exports serialize_tensor and deserialize_tensor.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar

import torch

from rollout.errors import ProtocolError, RolloutError
from rollout.sampling_params import SamplingParams
from rollout.version_spans import VersionSpans

T = TypeVar("T")
TopN = list[dict[int, float] | None]
_TENSOR_KEYS = frozenset({"dtype", "shape", "data"})


def serialize_tensor(tensor: torch.Tensor) -> list[Any]:
    """Return the values of `tensor` as nested lists, which keep the shape but not the dtype."""
    values: list[Any] = tensor.tolist()
    return values


def deserialize_tensor(tensor_as_list: list[Any]) -> torch.Tensor:
    """Return nested lists as a tensor with torch's default dtype for their values."""
    return torch.tensor(tensor_as_list)


def encode_tensor(tensor: torch.Tensor) -> dict[str, Any]:
    """Return dtype name, shape and raw bytes of a tensor on any device, for msgpack."""
    bytes_N = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return {
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "shape": list(tensor.shape),
        "data": bytes_N.numpy().tobytes(),
    }


def decode_tensor(encoded: Mapping[str, Any]) -> torch.Tensor:
    """Return the CPU tensor that `encode_tensor` encoded. Raises ProtocolError for an unknown dtype
    or a wrong number of bytes."""
    dtype = getattr(torch, str(encoded["dtype"]), None)
    if not isinstance(dtype, torch.dtype):
        raise ProtocolError(f"unknown tensor dtype {encoded['dtype']!r}")
    shape = torch.Size(encoded["shape"])
    num_bytes = shape.numel() * dtype.itemsize
    if len(encoded["data"]) != num_bytes:
        raise ProtocolError(
            f"{dtype} tensor of shape {list(shape)} needs {num_bytes} bytes, "
            f"got {len(encoded['data'])}"
        )
    # bytearray: tensors are writable, bytes are not.
    data = bytearray(encoded["data"])
    flat = torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)
    return flat.reshape(shape)


def encode_value(value: Any) -> Any:
    """Encode a tensor with `encode_tensor`, copy a list, and return any other value unchanged."""
    if isinstance(value, torch.Tensor):
        return encode_tensor(value)
    return list(value) if isinstance(value, list) else value


def decode_value(encoded: Any) -> Any:
    """Return the value that `encode_value` encoded."""
    if isinstance(encoded, list):
        return list(encoded)
    is_tensor = isinstance(encoded, dict) and encoded.keys() == _TENSOR_KEYS
    return decode_tensor(encoded) if is_tensor else encoded


def encode_top_n(top_n: TopN) -> list[list[list[Any]] | None]:
    """Return each token's dictionary as [key, log-prob] pairs."""
    # msgpack allows no integer keys.
    return [None if row is None else [[key, row[key]] for key in row] for row in top_n]


def decode_top_n(encoded: list[list[list[Any]] | None]) -> TopN:
    """Return the dictionaries that `encode_top_n` encoded, in their order."""
    return [None if row is None else {key: value for key, value in row} for row in encoded]


@dataclass(frozen=True, slots=True)
class FieldCodec:
    """The functions that encode and decode one kind of field. Neither is called for None."""

    encode: Callable[[Any], Any]
    decode: Callable[[Any], Any]


VALUE = FieldCodec(encode_value, decode_value)
TOP_N = FieldCodec(encode_top_n, decode_top_n)
SPANS = FieldCodec(VersionSpans.serialize, VersionSpans.deserialize)
SAMPLING_PARAMS = FieldCodec(SamplingParams.serialize, SamplingParams.deserialize)


@cache
def _defaults(cls: type[Any]) -> Mapping[str, Any]:
    """Return the default of each field of a dataclass by name, without fields that have no
    default."""
    found = {field.name: field.default for field in dataclasses.fields(cls)}
    return {name: value for name, value in found.items() if value is not dataclasses.MISSING}


@cache
def _field_names(cls: type[Any]) -> Mapping[str, None]:
    """Return the names of a dataclass's fields, in order."""
    return dict.fromkeys(field.name for field in dataclasses.fields(cls))  # slow, hence the cache


def encode_fields(
    instance: Any,
    codecs: Mapping[str, FieldCodec],
    without: Collection[str] = (),
    *,
    without_defaults: bool = False,
) -> dict[str, Any]:
    """Return the encoded fields of a dataclass instance by name, except for fields in `without`. A
    field that is not in `codecs` is encoded by VALUE. `without_defaults` leaves out fields with
    their default values, which `decode_fields` restores."""
    encoded: dict[str, Any] = {}
    key: Any = type(instance)  # mypy takes no class for hashable
    stored = vars(instance)  # reading block hashes as an attribute would compute them
    defaults = _defaults(key) if without_defaults else {}
    for name in _field_names(key):
        if name in without:
            continue
        value = stored[name] if name in stored else getattr(instance, name)
        if name in defaults and value is defaults[name]:
            continue
        encoded[name] = None if value is None else codecs.get(name, VALUE).encode(value)
    return encoded


def decode_fields(cls: type[T], encoded: Mapping[str, Any], codecs: Mapping[str, FieldCodec]) -> T:
    """Return the instance of `cls` whose fields `encode_fields` encoded. Absent fields get their
    defaults. Raises ProtocolError for an unknown, missing or unreadable field. A readable field
    with an illegal value raises its own error."""
    key: Any = cls
    if unknown := sorted(encoded.keys() - _field_names(key)):
        raise ProtocolError(f"{cls.__name__} has no field {', '.join(unknown)}")
    try:
        return cls(
            **{
                name: None if value is None else codecs.get(name, VALUE).decode(value)
                for name, value in encoded.items()
            }
        )
    except RolloutError:
        raise
    except (KeyError, TypeError, ValueError) as fault:
        raise ProtocolError(f"not an encoded {cls.__name__}: {fault!r}") from fault
