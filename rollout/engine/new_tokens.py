"""What running requests have generated since they were last asked, in columns for all of them."""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterable, Mapping

import numpy as np

from rollout.engine.running_request import RunningRequest
from rollout.requests.codec import TopN
from rollout.requests.generated_tokens import GeneratedColumns, GeneratedTokens

_NUM_VALUES = 12  # in a row below


def new_tokens(
    running: Mapping[int, RunningRequest], wanted: Iterable[tuple[int, int]]
) -> GeneratedColumns:
    """The tokens from an offset on of each (request id, offset) that is running and has such ones.

    Hundreds of requests with one token each pass here in every step: what all new tokens of a
    request share is gathered by request, and NumPy spreads it over the tokens. They share it unless
    the weights have changed among them or the request was queued again: those few are put in after.
    """
    values: list[int] = []
    token_ids, log_probs = array("i"), array("f")
    top_n: TopN = []
    others: list[tuple[int, GeneratedTokens]] = []  # and where their tokens begin
    for request_id, offset in wanted:
        request = running.get(request_id)
        if request is None:
            continue
        start = offset - request.num_before
        count = len(request.token_ids) - start
        if count <= 0:
            continue
        first = request.num_prompt + start  # length of the first token's context
        policy_start, policy_version, _, _ = request.policy_spans.last_run
        kv = request.segment.kv_spans.last_run
        if start >= 0 and policy_start <= first and kv[0] < first:
            token_ids.extend(request.token_ids[start:])
            own_log_probs, own_top_n = request.log_probs, request.top_n
            if has_log_probs := own_log_probs is not None:
                log_probs.extend(own_log_probs[start:])
            if has_top_n := own_top_n is not None:
                top_n += own_top_n[start:]
        else:
            tokens = GeneratedTokens.of(request.record, offset)
            assert tokens is not None
            others.append((len(token_ids), tokens))
            token_ids.frombytes(tokens.token_ids.tobytes())
            if tokens.log_probs is not None:
                log_probs.frombytes(tokens.log_probs.tobytes())
            top_n += tokens.top_n or []
            has_log_probs, has_top_n = tokens.log_probs is not None, tokens.top_n is not None
        values += (request_id, offset, count, request.entry_version)
        values += (has_log_probs, has_top_n, first, policy_version)
        values += kv
    return _columns(values, token_ids, log_probs, top_n, others)


def _columns(
    values: list[int],
    token_ids: array[int],
    log_probs: array[float],
    top_n: TopN,
    others: list[tuple[int, GeneratedTokens]],
) -> GeneratedColumns:
    # NumPy takes several times as long to make an array of a list.
    packed = struct.pack(f"{len(values)}q", *values)
    of_requests_VR = np.frombuffer(packed, np.int64).reshape(-1, _NUM_VALUES).T
    request_ids, offsets, counts, entries, has_log_probs, has_top_n, *_ = of_requests_VR
    of_tokens_VT = of_requests_VR[6:]
    if len(token_ids) != len(counts):  # else each has one, as where every token is streamed
        of_tokens_VT = np.repeat(of_tokens_VT, counts, axis=1)
        ends = np.cumsum(counts)
        of_tokens_VT[0] += np.arange(len(token_ids)) - np.repeat(ends - counts, counts)
    length_T, policy_T, start_T, version_T, oldest_T, before_T = of_tokens_VT
    columns = GeneratedColumns(
        request_ids=request_ids,
        offsets=offsets,
        counts=counts.astype(np.int32),
        entry_versions=entries.astype(np.int32),
        token_ids=np.frombuffer(token_ids, np.int32),
        policy_versions=policy_T.astype(np.int32),
        context_kv_version_min=oldest_T.astype(np.int32),
        context_kv_version_mean=(before_T + (length_T - start_T) * version_T) / length_T,
        has_log_probs=has_log_probs.astype(np.uint8),
        log_probs=np.frombuffer(log_probs, np.float32),
        has_top_n=has_top_n.astype(np.uint8),
        top_n=top_n,
    )
    for start, tokens in others:
        end = start + len(tokens.token_ids)
        columns.policy_versions[start:end] = tokens.policy_versions
        columns.context_kv_version_min[start:end] = tokens.context_kv_version_min
        columns.context_kv_version_mean[start:end] = tokens.context_kv_version_mean
    return columns
