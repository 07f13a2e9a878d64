"""What travels through the coordinator unopened: sampling params and records, packed once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch

from rollout.coordinator.protocol.messages import Sample
from rollout.coordinator.protocol.token_runs import TokenRun, TopNRun
from rollout.coordinator.protocol.wire import DEFAULT_MAX_FRAME_BYTES, pack, unpack
from rollout.errors import ProtocolError, RolloutError
from rollout.requests.dynamic_request import DynamicInferenceRequest
from rollout.requests.generated_tokens import GeneratedTokens
from rollout.requests.record import DynamicInferenceRequestRecord
from rollout.sampling_params import SamplingParams
from rollout.version_spans import VersionSpans

T = TypeVar("T")


def pack_params(params: SamplingParams) -> bytes:
    """Return `params` as the bytes of a Sample."""
    return pack(params.serialize())


def unpack_params(packed: bytes) -> SamplingParams:
    """Return what `pack_params` wrote. Raises ProtocolError if it is no map, InvalidRequestError
    naming a value out of its range."""
    return _built(SamplingParams.deserialize, unpack(packed), "sampling params")


def pack_record(record: DynamicInferenceRequestRecord) -> bytes:
    """Return `record` as the bytes of an EngineReply."""
    return pack(record.serialize())


def unpack_record(packed: bytes) -> DynamicInferenceRequestRecord:
    """Return what `pack_record` wrote, under the request id of the engine that wrote it.

    Raises ProtocolError if it is no record, or another RolloutError naming an illegal value.
    """
    encoded = unpack(packed, DEFAULT_MAX_FRAME_BYTES)
    return _built(DynamicInferenceRequestRecord.deserialize, encoded, "a record")


def _built(build: Callable[[Mapping[str, Any]], T], encoded: Any, what: str) -> T:
    if not isinstance(encoded, dict):
        raise ProtocolError(f"not {what}: a {type(encoded).__name__}")
    try:
        return build(encoded)
    except RolloutError:
        raise
    except (AttributeError, LookupError, RuntimeError, TypeError, ValueError) as fault:
        # The codecs below read what they wrote; bytes from a socket may be anything.
        raise ProtocolError(f"not {what}: {fault!r:.200}") from fault


def token_run(tokens: GeneratedTokens) -> TokenRun:
    """The tokens as messages carry them."""
    return TokenRun(
        offset=tokens.offset,
        entry_version=tokens.entry_version,
        token_ids=tokens.token_ids,
        policy_versions=tokens.policy_versions,
        context_kv_version_min=tokens.context_kv_version_min,
        context_kv_version_mean=tokens.context_kv_version_mean,
        log_probs=tokens.log_probs,
        top_n=None if tokens.top_n is None else TopNRun.from_rows(tokens.top_n),
    )


def resumed_record(
    sample: Sample,
    params: SamplingParams,
    prompt_tokens: Sequence[int],
    *,
    prompt: str | None,
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
    log_probs = None if run.log_probs is None else run.log_probs.tolist()
    return DynamicInferenceRequestRecord.from_request(
        DynamicInferenceRequest(
            request_id=sample.request_id,
            prompt=prompt,
            prompt_tokens=torch.tensor(list(prompt_tokens), dtype=torch.int64),
            sampling_params=params,
            priority=priority,
            seed=sample.seed,
            weights_version=run.entry_version,
            generated_tokens=run.token_ids.tolist(),
            generated_log_probs=log_probs if params.return_log_probs else None,
            generated_top_n_logprobs=None if run.top_n is None else run.top_n.rows(),
            tpot=[float("nan")] * len(run),
            policy_spans=spans,
            context_kv_version_min=run.context_kv_version_min.tolist(),
            context_kv_version_mean=run.context_kv_version_mean.tolist(),
        )
    )
