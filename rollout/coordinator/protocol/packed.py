"""What travels through the coordinator unopened: sampling params and records, packed once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Any, TypeVar

import msgspec
import numpy as np
import torch
from msgspec import Meta

from rollout.coordinator.protocol.messages import Sample
from rollout.coordinator.protocol.token_runs import TokenRuns, TopNRun
from rollout.coordinator.protocol.wire import FAULTS, pack, unpack
from rollout.errors import ProtocolError, RolloutError
from rollout.requests.columns import ColumnName, ColumnType
from rollout.requests.dynamic_request import DynamicInferenceRequest
from rollout.requests.generated_tokens import GeneratedColumns
from rollout.requests.record import DynamicInferenceRequestRecord
from rollout.sampling_params import SamplingParams
from rollout.version_spans import VersionSpans

T = TypeVar("T")
U = TypeVar("U")


def pack_params(params: SamplingParams) -> bytes:
    """Return `params` as the bytes of a Sample."""
    return pack(params.serialize())


def unpack_params(packed: bytes) -> SamplingParams:
    """Return what `pack_params` wrote. Raises ProtocolError if it is no map, InvalidRequestError
    naming a value out of its range."""
    return _built(SamplingParams.deserialize, unpack(packed), "sampling params")


class _Segment(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """A segment of a record: plain values, and those per token as (dtype, binary)."""

    fields: dict[str, Any]
    columns: dict[ColumnName, tuple[ColumnType, bytes]]


class _Record(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    latency: float | None
    segments: Annotated[list[_Segment], Meta(max_length=2**16)]


_record_decoder = msgspec.msgpack.Decoder(_Record)


def pack_record(record: DynamicInferenceRequestRecord) -> bytes:
    """Return `record` as the bytes of an EngineReply."""
    segments = [
        [fields, {name: (c.dtype.str, c.tobytes()) for name, c in columns.items()}]
        for fields, columns in record.serialize_apart()
    ]
    return pack([record.latency, segments])


def unpack_record(packed: bytes) -> DynamicInferenceRequestRecord:
    """Return what `pack_record` wrote, under the request id of the engine that wrote it.

    Its values per token are views of what was received until they are read as lists. Raises
    ProtocolError if it is no record, or another RolloutError naming an illegal value.
    """
    return _built(_unpacked, packed, "a record")


def _unpacked(packed: bytes) -> DynamicInferenceRequestRecord:
    record = _record_decoder.decode(packed)
    segments = [
        segment.fields
        | {name: np.frombuffer(data, dtype) for name, (dtype, data) in segment.columns.items()}
        for segment in record.segments
    ]
    return DynamicInferenceRequestRecord.deserialize(
        {"requests": segments, "latency": record.latency}
    )


def _built(build: Callable[[U], T], encoded: U, what: str) -> T:
    """Return what `build` makes of bytes from a socket, which may be anything."""
    try:
        return build(encoded)
    except RolloutError:
        raise
    except (AttributeError, LookupError, RuntimeError, *FAULTS) as fault:
        raise ProtocolError(f"not {what}: {fault!r:.200}") from fault


def token_runs(tokens: GeneratedColumns, attempts: Sequence[int]) -> TokenRuns:
    """The tokens as messages carry them, under the attempts of their requests."""
    return TokenRuns(
        request_ids=tokens.request_ids,
        attempts=np.array(attempts, np.int64),
        offsets=tokens.offsets,
        counts=tokens.counts,
        entry_versions=tokens.entry_versions,
        token_ids=tokens.token_ids,
        policy_versions=tokens.policy_versions,
        context_kv_version_min=tokens.context_kv_version_min,
        context_kv_version_mean=tokens.context_kv_version_mean,
        has_log_probs=tokens.has_log_probs,
        log_probs=tokens.log_probs,
        has_top_n=tokens.has_top_n,
        top_n=TopNRun.from_rows(tokens.top_n) if tokens.has_top_n.any() else None,
    )


def resumed_record(
    sample: Sample,
    params: SamplingParams,
    prompt_tokens: Sequence[int],
    *,
    priority: int,
) -> DynamicInferenceRequestRecord:
    """The record of a request whose tokens so far are `sample.resumed`, to be added to an engine.

    What only its first engine knew, such as the times of its tokens, is not there.
    """
    run = sample.resumed
    assert run is not None
    spans = VersionSpans()
    spans.append(len(prompt_tokens), run.entry_version)
    for version in run.policy_versions.tolist():
        spans.append(1, version)
    per_token: dict[str, Any] = {
        "generated_tokens": run.token_ids,
        "generated_log_probs": run.log_probs if params.return_log_probs else None,
        "tpot": np.full(len(run), np.nan),
        "context_kv_version_min": run.context_kv_version_min,
        "context_kv_version_mean": run.context_kv_version_mean,
    }
    return DynamicInferenceRequestRecord.from_request(
        DynamicInferenceRequest(
            request_id=sample.request_id,
            prompt_tokens=torch.tensor(list(prompt_tokens), dtype=torch.int64),
            sampling_params=params,
            priority=priority,
            seed=sample.seed,
            weights_version=run.entry_version,
            generated_top_n_logprobs=None if run.top_n is None else run.top_n.rows(),
            policy_spans=spans,
            **per_token,
        )
    )
