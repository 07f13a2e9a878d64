"""The tokens that requests have generated since an offset: of one request, or of many."""

from __future__ import annotations

import struct
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rollout.requests.codec import TopN
from rollout.requests.dynamic_request import DynamicInferenceRequest
from rollout.requests.record import DynamicInferenceRequestRecord, values_from

# A segment, and the first of its generated tokens that is meant.
_Tail = tuple[DynamicInferenceRequest, int]
_NUM_VALUES = 13  # in a row of GeneratedColumns.of_rows


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneratedTokens:
    """Generated tokens [offset, offset + n) of a request with all that was stamped on them.

    Offsets count the generated tokens of all segments. entry_version: the weights version under
    which the request entered. token_ids, policy_versions, context_kv_version_min: int32 [n];
    context_kv_version_mean: float64 [n]; log_probs: float32 [n], ranks: int32 [n] and top_n if they
    were asked for.
    """

    offset: int
    entry_version: int
    token_ids: npt.NDArray[np.int32]
    policy_versions: npt.NDArray[np.int32]
    context_kv_version_min: npt.NDArray[np.int32]
    context_kv_version_mean: npt.NDArray[np.float64]
    log_probs: npt.NDArray[np.float32] | None
    ranks: npt.NDArray[np.int32] | None
    top_n: TopN | None

    @classmethod
    def of(cls, record: DynamicInferenceRequestRecord, offset: int) -> GeneratedTokens | None:
        """Return the generated tokens from `offset` on; None without any.

        What it costs depends on how many these are, not on those before.
        """
        tails = _tails(record, offset)
        if not tails:
            return None
        first, num_tokens = len(record[0].prompt_tokens) + offset, record.current.num_tokens
        context_versions = [segment.context_kv_versions(start) for segment, start in tails]
        log_probs = values_from(record.requests, "generated_log_probs", float("nan"), start=offset)
        ranks = values_from(record.requests, "generated_ranks", 0, start=offset)
        token_ids = [np.asarray(s.column("generated_tokens")[i:], np.int32) for s, i in tails]
        return cls(
            offset=offset,
            entry_version=record[0].weights_version,
            token_ids=np.concatenate(token_ids),
            policy_versions=record.current.stamped_policy_spans()
            .slice(first, num_tokens)
            .to_array(),
            context_kv_version_min=np.concatenate([oldest for oldest, _ in context_versions]),
            context_kv_version_mean=np.concatenate([mean for _, mean in context_versions]),
            log_probs=None if log_probs is None else np.array(log_probs, dtype=np.float32),
            ranks=None if ranks is None else np.array(ranks, dtype=np.int32),
            top_n=values_from(record.requests, "generated_top_n_logprobs", None, start=offset),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneratedColumns:
    """New tokens of R requests, T in all, one request after the other; each has some.

    request_ids, offsets: int64 [R]; counts, entry_versions: int32 [R]; as in GeneratedTokens, and
    so are token_ids, policy_versions, context_kv_version_min: int32 [T], context_kv_version_mean:
    float64 [T]. log_probs: float32, of the requests whose has_log_probs, uint8 [R], is 1. ranks:
    int32, of those whose has_ranks is 1, and top_n: of those whose has_top_n is 1.
    """

    request_ids: npt.NDArray[np.int64]
    offsets: npt.NDArray[np.int64]
    counts: npt.NDArray[np.int32]
    entry_versions: npt.NDArray[np.int32]
    token_ids: npt.NDArray[np.int32]
    policy_versions: npt.NDArray[np.int32]
    context_kv_version_min: npt.NDArray[np.int32]
    context_kv_version_mean: npt.NDArray[np.float64]
    has_log_probs: npt.NDArray[np.uint8]
    log_probs: npt.NDArray[np.float32]
    has_ranks: npt.NDArray[np.uint8]
    ranks: npt.NDArray[np.int32]
    has_top_n: npt.NDArray[np.uint8]
    top_n: TopN

    @classmethod
    def of_rows(
        cls,
        rows: Sequence[int],
        token_ids: array[int],
        log_probs: array[float],
        ranks: array[int],
        top_n: TopN,
    ) -> GeneratedColumns:
        """Return the columns of requests whose new tokens each have one policy and one KV run.

        `rows` has, flat, for each request: id, offset, count, entry version, has log-probs, has
        ranks, has top-n, length of the first token's context, policy version, and the four values
        of VersionSpans.last_run of its KV.
        """
        # NumPy takes several times as long to make an array of a list.
        packed = struct.pack(f"{len(rows)}q", *rows)
        of_requests_VR = np.frombuffer(packed, np.int64).reshape(-1, _NUM_VALUES).T
        request_ids, offsets, counts, entries, *flags_FR = of_requests_VR[:7]
        has_log_probs, has_ranks, has_top_n = flags_FR
        of_tokens_VT = of_requests_VR[7:]
        if len(token_ids) != len(counts):  # else each has one, as where every token is streamed
            of_tokens_VT = np.repeat(of_tokens_VT, counts, axis=1)
            ends = np.cumsum(counts)
            of_tokens_VT[0] += np.arange(len(token_ids)) - np.repeat(ends - counts, counts)
        length_T, policy_T, start_T, version_T, oldest_T, before_T = of_tokens_VT
        return cls(
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
            has_ranks=has_ranks.astype(np.uint8),
            ranks=np.frombuffer(ranks, np.int32),
            has_top_n=has_top_n.astype(np.uint8),
            top_n=top_n,
        )

    def set_versions(self, start: int, tokens: GeneratedTokens) -> None:
        """Write the versions of one request's tokens, the first of which has the index `start`."""
        at = slice(start, start + len(tokens.token_ids))
        self.policy_versions[at] = tokens.policy_versions
        self.context_kv_version_min[at] = tokens.context_kv_version_min
        self.context_kv_version_mean[at] = tokens.context_kv_version_mean


def _tails(record: DynamicInferenceRequestRecord, offset: int) -> list[_Tail]:
    """Return the segments with generated tokens from `offset` on, and where each one starts."""
    tails: list[_Tail] = []
    for segment in record.requests:
        num_generated = segment.num_generated_tokens
        if offset < num_generated:
            tails.append((segment, max(offset, 0)))
        offset -= num_generated
    return tails
