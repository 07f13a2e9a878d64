"""Sampling and scoring with log-probs in a few passes over the logits, in torch on any device.

Used by TorchOps in `rollout.backends.ops.reference`: on a CPU without compiled kernels, and on a
GPU for batches with top-n. Also used by `rollout.worker.model_runner` for ranks.

A token is drawn by inverting the cumulative distribution at the row's own uniform number. Weights
are float32, and sums of weights over blocks of 128 and cumulative sums are float64. This costs one
exp per logit. Noise per token (Gumbel-max) would add a hash and two logarithms.

Shape letters: S sample rows, P scored tokens, R rows of one chunk, V vocabulary, B blocks, N top-n.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from rollout.backends.forward_batch import MODE_CODES, SamplingBatch
from rollout.backends.ops.truncation import keep_mask
from rollout.step.output import SampleResult, ScoreResult

Part = TypeVar("Part", SampleResult[Tensor], ScoreResult[Tensor])

_BLOCK = 128
_CHUNK_ELEMENTS = 1 << 19  # 2 MiB of float32: small enough to stay in cache, few enough calls


def sample(logits_SV: Tensor, sampling: SamplingBatch) -> SampleResult[Tensor]:
    """Draw one token per row, with its log-prob and top-n in the row's mode if `sampling` asks for
    them.

    Rows at temperature 0 take the largest logit, and among equal logits the lowest id. A row whose
    largest logit is not finite (a NaN, +inf, or only -inf) gets is_finite False, token 0 and
    meaningless log-probs. A token of zero probability is never drawn.
    """
    parts = [
        _sample_chunk(logits_SV[start:end].float(), sampling.select(slice(start, end)))
        for start, end in _chunks(logits_SV)
    ]
    return concatenated(parts)


def concatenated(parts: Sequence[Part]) -> Part:
    """Concatenate results of consecutive rows. A field that is None in the first part stays
    None."""
    first = parts[0]
    if len(parts) == 1:
        return first
    names = [field.name for field in fields(first)]
    columns = {name: [getattr(part, name) for part in parts] for name in names}
    arrays: Any = {
        name: torch.cat(column) for name, column in columns.items() if column[0] is not None
    }
    return type(first)(**arrays)


def score(logits_PV: Tensor, targets_P: Tensor, top_n: int) -> ScoreResult[Tensor]:
    """Return log_softmax(logits)[target] of each row, and its top-n unless `top_n` is 0."""
    parts = []
    for start, end in _chunks(logits_PV):
        logits_RV = logits_PV[start:end].float()
        max_R1 = logits_RV.amax(1, keepdim=True)
        norm_R1 = _log_norm(logits_RV, max_R1).unsqueeze(1)
        target_R1 = logits_RV.gather(1, targets_P[start:end, None])
        logprobs_R = (target_R1 - max_R1 - norm_R1).squeeze(1)
        top_ids_RN = top_logprobs_RN = None
        if top_n:
            values_RN, top_ids_RN = logits_RV.topk(top_n, dim=1)
            top_logprobs_RN = values_RN - max_R1 - norm_R1
        parts.append(
            ScoreResult(
                logprobs_P=logprobs_R, top_ids_PN=top_ids_RN, top_logprobs_PN=top_logprobs_RN
            )
        )
    return concatenated(parts)


def token_ranks(logits_SV: Tensor, token_ids_S: Tensor) -> Tensor:
    """Return 1 + the number of larger logits in the row, int32 [S]. Equal logits share a rank."""
    chosen_S1 = logits_SV.gather(1, token_ids_S.unsqueeze(1))
    return (logits_SV > chosen_S1).sum(1, dtype=torch.int32) + 1


def _chunks(logits_SV: Tensor) -> Iterator[tuple[int, int]]:
    """Yield the ranges of rows to compute one after the other. Without rows, yield one empty
    range."""
    num_rows, vocabulary = logits_SV.shape
    # On a CPU a range fits into the cache; on a GPU there is one range.
    step = max(1, _CHUNK_ELEMENTS // vocabulary) if logits_SV.device.type == "cpu" else num_rows
    for start in range(0, max(num_rows, 1), max(step, 1)):
        yield start, min(start + step, num_rows)


class _Drawn(NamedTuple):
    """Drawn tokens, and logarithms of the weights' sums, which normalise log-probs at
    temperature."""

    token_ids_R: Tensor
    norm_R: Tensor  # over all tokens
    kept_norm_R: Tensor  # over the tokens that truncation keeps
    kept_logits_RV: Tensor  # -inf for dropped tokens, in rows that report processed log-probs


def _sample_chunk(logits_RV: Tensor, sampling: SamplingBatch) -> SampleResult[Tensor]:
    max_R1 = logits_RV.amax(1, keepdim=True)
    is_finite_R = max_R1.squeeze(1).isfinite()
    is_greedy_R = sampling.temperature_S == 0
    inverse_R = torch.where(is_greedy_R, 1.0, sampling.temperature_S).reciprocal_()
    if sampling.all_greedy:
        norm_R = _log_norm(logits_RV, max_R1) if sampling.any_logprobs or sampling.top_n else max_R1
        drawn = _Drawn(logits_RV.argmax(1), norm_R, norm_R, logits_RV)
    else:
        drawn = _draw_rows(logits_RV, max_R1, inverse_R, is_greedy_R, sampling)
    token_ids_R = torch.where(is_finite_R, drawn.token_ids_R, 0)
    if not (sampling.any_logprobs or sampling.top_n):
        return SampleResult(token_ids_S=token_ids_R, is_finite_S=is_finite_R)

    is_raw_R = (sampling.mode_S == MODE_CODES["raw"]) | is_greedy_R
    is_processed_R = (sampling.mode_S == MODE_CODES["processed"]) & ~is_greedy_R
    norm_R = torch.where(is_processed_R, drawn.kept_norm_R, drawn.norm_R)
    # Raw rows whose norm was summed at temperature.
    rescaled = (is_raw_R & (inverse_R != 1)).nonzero().squeeze(1)
    if rescaled.numel():
        norm_R = norm_R.index_copy(0, rescaled, _log_norm(logits_RV[rescaled], max_R1[rescaled]))

    def logprob(logits_RN: Tensor) -> Tensor:
        scale_R1 = torch.where(is_raw_R, 1.0, inverse_R).unsqueeze(1)
        return (logits_RN - max_R1) * scale_R1 - norm_R.unsqueeze(1)

    logprobs_R = top_ids_RN = top_logprobs_RN = None
    if sampling.any_logprobs:
        logprobs_R = logprob(logits_RV.gather(1, token_ids_R.unsqueeze(1))).squeeze(1)
    if sampling.top_n:
        values_RN, top_ids_RN = drawn.kept_logits_RV.topk(sampling.top_n, dim=1)
        top_logprobs_RN = logprob(values_RN)
    return SampleResult(
        token_ids_S=token_ids_R,
        is_finite_S=is_finite_R,
        logprobs_S=logprobs_R,
        top_ids_SN=top_ids_RN,
        top_logprobs_SN=top_logprobs_RN,
    )


def _draw_rows(
    logits_RV: Tensor,
    max_R1: Tensor,
    inverse_R: Tensor,
    is_greedy_R: Tensor,
    sampling: SamplingBatch,
) -> _Drawn:
    """Draw all rows by inverse CDF. Then replace truncated rows by draws from their kept tokens,
    and greedy rows by their largest logits."""
    vocabulary = logits_RV.shape[1]
    weights_RW = _padded_weights(logits_RV, max_R1, inverse_R)
    token_ids_R, total_R = _draw(weights_RW, sampling.uniforms_S)
    norm_R = kept_norm_R = total_R.log().float()
    kept_logits_RV = logits_RV
    rows_K = _truncated_rows(sampling, is_greedy_R)
    if rows_K is not None:
        kept_KW = weights_RW[rows_K]
        keep_KV = keep_mask(
            logits_RV[rows_K],
            kept_KW[:, :vocabulary],
            inverse_R[rows_K],
            sampling.top_k_S[rows_K],
            sampling.top_p_S[rows_K],
            sampling.min_p_S[rows_K],
        )
        kept_KW[:, :vocabulary] *= keep_KV
        token_ids_R[rows_K], total_K = _draw(kept_KW, sampling.uniforms_S[rows_K])
        kept_norm_R = norm_R.index_copy(0, rows_K, total_K.log_().float())
        if sampling.top_n:
            kept_logits_RV = _mask_processed(logits_RV, keep_KV, rows_K, sampling.mode_S)
    if sampling.any_greedy:
        token_ids_R = torch.where(is_greedy_R, logits_RV.argmax(1), token_ids_R)
    return _Drawn(token_ids_R, norm_R, kept_norm_R, kept_logits_RV)


def _padded_weights(logits_RV: Tensor, max_R1: Tensor, inverse_R: Tensor) -> Tensor:
    """Return exp((logits - max) / temperature), padded with zeros to whole blocks."""
    num_rows, vocabulary = logits_RV.shape
    weights_RW = logits_RV.new_empty(num_rows, -(-vocabulary // _BLOCK) * _BLOCK)
    weights_RW[:, vocabulary:] = 0
    head_RV = weights_RW[:, :vocabulary]
    torch.sub(logits_RV, max_R1, out=head_RV)
    head_RV.mul_(inverse_R.unsqueeze(1)).exp_()
    return weights_RW


def _log_norm(logits_RV: Tensor, max_R1: Tensor) -> Tensor:
    """Return log(sum(exp(logits - max))) of each row, float32."""
    return (logits_RV - max_R1).exp_().sum(1, dtype=torch.float64).log_().float()


def _draw(weights_RW: Tensor, uniforms_R: Tensor) -> tuple[Tensor, Tensor]:
    """Return the token at which each row's cumulative weight passes its uniform's share, and the
    row's total weight in float64."""
    num_rows, width = weights_RW.shape
    blocks_RBE = weights_RW.view(num_rows, width // _BLOCK, _BLOCK)
    masses_RB = blocks_RBE.sum(-1, dtype=torch.float64)
    total_R = masses_RB.sum(1)
    block_R, rest_R = _locate(masses_RB, uniforms_R * total_R)
    index_R1E = block_R.view(-1, 1, 1).expand(-1, 1, _BLOCK)
    offset_R, _ = _locate(blocks_RBE.gather(1, index_R1E).squeeze(1).double(), rest_R)
    return block_R * _BLOCK + offset_R, total_R


def _locate(masses_RB: Tensor, target_R: Tensor) -> tuple[Tensor, Tensor]:
    """Return the first index whose cumulative mass exceeds the target, and the target minus the
    mass before this index. The index always has mass. If rounding put a target at or above the sum,
    the last index with mass is returned."""
    cumulative_RB = masses_RB.cumsum(1)
    target_R1 = target_R.unsqueeze(1)
    index_R1 = torch.searchsorted(cumulative_RB, target_R1, right=True)
    last_R1 = torch.searchsorted(cumulative_RB, cumulative_RB[:, -1:].contiguous())
    index_R1 = torch.minimum(index_R1, last_R1).clamp_(max=masses_RB.shape[1] - 1)
    before_R1 = torch.where(index_R1 > 0, cumulative_RB.gather(1, (index_R1 - 1).clamp_(min=0)), 0)
    return index_R1.squeeze(1), (target_R1 - before_R1).squeeze(1)


def _truncated_rows(sampling: SamplingBatch, is_greedy_R: Tensor) -> Tensor | None:
    """Return the indices of rows with top-k, top-p or min-p; None if there are no such rows."""
    if not sampling.any_truncation:
        return None
    truncates_R = (sampling.top_k_S > 0) | (sampling.min_p_S > 0)
    truncates_R |= (sampling.top_p_S > 0) & (sampling.top_p_S < 1)
    rows_K = (truncates_R & ~is_greedy_R).nonzero().squeeze(1)
    return rows_K if rows_K.numel() else None


def _mask_processed(logits_RV: Tensor, keep_KV: Tensor, rows_K: Tensor, mode_R: Tensor) -> Tensor:
    """Return the logits with dropped tokens at -inf, in rows that report processed log-probs."""
    is_processed_K = mode_R[rows_K] == MODE_CODES["processed"]
    visible_KV = keep_KV | ~is_processed_K.unsqueeze(1)
    masked_KV = logits_RV[rows_K].masked_fill(~visible_KV, -torch.inf)
    return logits_RV.index_copy(0, rows_K, masked_KV)
