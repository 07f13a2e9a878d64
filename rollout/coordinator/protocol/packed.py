"""Functions that convert sampling params and records to bytes of messages, and back.

Used by `rollout.coordinator.agent.requests` for engines. For clients, used by
`rollout.coordinator.client.submission` and `rollout.coordinator.client.pending_requests`. The
coordinator forwards these bytes, and reads only token limits. Converted params are cached.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Annotated, Any, TypeVar

import msgspec
import numpy as np
import torch
from msgspec import Meta, structs

from rollout.coordinator.protocol.messages import Sample
from rollout.errors import ProtocolError, RolloutError
from rollout.requests.columns import TOP_N_FIELDS, ArrayField, ArrayType, TopNField
from rollout.requests.dynamic_request import DynamicInferenceRequest
from rollout.requests.record import DynamicInferenceRequestRecord
from rollout.requests.token_runs import TopNRun
from rollout.sampling_params import SamplingParams
from rollout.wire import FAULTS, MAX_PLAIN_BYTES, Count, Name, pack, unpack

T = TypeVar("T")
U = TypeVar("U")


# Bound of the plain values of all segments of a record, mostly events: see MAX_PLAIN_BYTES.
MAX_RECORD_PLAIN_BYTES = 4 * MAX_PLAIN_BYTES
# Most requests share their params, and unpacking params takes as long as a short record.
_MAX_CACHED_PARAMS, _MAX_CACHED_BYTES = 256, 4096


@lru_cache(_MAX_CACHED_PARAMS)
def pack_params(params: SamplingParams) -> bytes:
    """Return `params` as bytes for a Sample. Raises ProtocolError if msgpack cannot carry a
    value."""
    return pack(params.serialize())


def unpack_params(packed: bytes) -> SamplingParams:
    """Return the params that `pack_params` packed. Raises ProtocolError if `packed` is malformed,
    and InvalidRequestError, naming the value, if one is out of range."""
    return _cached_params(packed) if len(packed) <= _MAX_CACHED_BYTES else _params_in(packed)


def _params_in(packed: bytes) -> SamplingParams:
    return _built(SamplingParams.deserialize, unpack(packed), "sampling params")


_cached_params = lru_cache(_MAX_CACHED_PARAMS)(_params_in)


class _Tensor(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    dtype: Name
    shape: Annotated[list[Count], Meta(max_length=16)]
    data: bytes


class _Segment(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """One request of a record.

    fields: packed map of plain values.
    columns: values per token as (dtype, bytes).
    tensors: values that are tensors."""

    fields: msgspec.Raw
    columns: dict[ArrayField, tuple[ArrayType, bytes]]
    tensors: Annotated[dict[Name, _Tensor], Meta(max_length=64)] = {}
    top_n: dict[TopNField, TopNRun] = {}
    sampling_params: bytes | None = None


class _Record(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    latency: float | None
    segments: Annotated[list[_Segment], Meta(max_length=2**16)]


_record_decoder = msgspec.msgpack.Decoder(_Record)
_TENSOR_FIELDS = set(_Tensor.__struct_fields__)


def pack_record(record: DynamicInferenceRequestRecord) -> bytes:
    """Return `record` as bytes for an EngineReply. Raises ProtocolError if the record has more
    plain values than `unpack_record` reads."""
    parts = zip(record.requests, record.serialize_apart(), strict=True)
    segments = [_packed(request, *own) for request, own in parts]
    _check_size(segments)
    return pack(_Record(record.latency, segments))


def _packed(
    request: DynamicInferenceRequest, values: Mapping[str, Any], columns: Mapping[str, Any]
) -> _Segment:
    top_n, tensors, plain = {}, {}, {}
    for name, value in values.items():
        if name in TOP_N_FIELDS and value is not None:
            top_n[name] = TopNRun.from_rows(getattr(request, name))
        elif isinstance(value, dict) and value.keys() == _TENSOR_FIELDS:
            tensors[name] = _Tensor(**value)
        elif name != "sampling_params":
            plain[name] = value
    params = request.sampling_params
    return _Segment(
        fields=msgspec.Raw(pack(plain)),
        columns={name: (c.dtype.str, c.tobytes()) for name, c in columns.items()},
        tensors=tensors,
        top_n=top_n,
        sampling_params=None if params is None else pack_params(params),
    )


def unpack_record(packed: bytes) -> DynamicInferenceRequestRecord:
    """Return the record that `pack_record` packed, with the request id that the engine used.

    Values per token are views of `packed` until they are read as lists. Raises ProtocolError if
    `packed` is malformed or has too many plain values. Raises another RolloutError, naming the
    value, if one is illegal."""
    return _built(_unpacked, packed, "a record")


def _unpacked(packed: bytes) -> DynamicInferenceRequestRecord:
    encoded = _record_decoder.decode(packed)
    _check_size(encoded.segments)
    segments = [
        unpack(segment.fields, MAX_RECORD_PLAIN_BYTES)
        | {name: np.frombuffer(data, dtype) for name, (dtype, data) in segment.columns.items()}
        | {name: structs.asdict(tensor) for name, tensor in segment.tensors.items()}
        for segment in encoded.segments
    ]
    record = DynamicInferenceRequestRecord.deserialize(
        {"requests": segments, "latency": encoded.latency}
    )
    for request, segment in zip(record.requests, encoded.segments, strict=True):
        if segment.sampling_params is not None:
            request.sampling_params = unpack_params(segment.sampling_params)
        for name, run in segment.top_n.items():
            setattr(request, name, run.rows())
    return record


def _check_size(segments: Sequence[_Segment]) -> None:
    num_bytes = sum(memoryview(segment.fields).nbytes for segment in segments)
    if num_bytes > MAX_RECORD_PLAIN_BYTES:
        raise ProtocolError(
            f"a record with {num_bytes} bytes of plain values, such as events; at most "
            f"{MAX_RECORD_PLAIN_BYTES} are allowed"
        )


def _built(build: Callable[[U], T], encoded: U, what: str) -> T:
    """Return `build(encoded)`, and turn errors of malformed bytes into ProtocolError. A
    RolloutError is raised unchanged. A ProtocolError names `what` was built."""
    try:
        return build(encoded)
    except RolloutError:
        raise
    except (AttributeError, LookupError, RuntimeError, *FAULTS) as fault:
        raise ProtocolError(f"not {what}: {fault!r:.200}") from fault


def resumed_record(
    sample: Sample,
    params: SamplingParams,
    prompt_tokens: Sequence[int],
    *,
    priority: int,
) -> DynamicInferenceRequestRecord:
    """Return the record of a request that already has the tokens `sample.resumed`. The record is
    for `Engine.add_record`. Values that only the earlier engine knew, such as token times, are
    missing."""
    run = sample.resumed
    assert run is not None
    return DynamicInferenceRequestRecord.from_request(
        DynamicInferenceRequest(
            request_id=sample.request_id,
            prompt_tokens=torch.tensor(list(prompt_tokens), dtype=torch.int64),
            sampling_params=params,
            priority=priority,
            seed=sample.seed,
            weights_version=run.entry_version,
            policy_spans=run.policy_spans(len(prompt_tokens)),
            **run.request_fields(params),
        )
    )
