"""Sampling and scoring on a GPU by fixed launches without host waits, which a graph can capture.

Used by `rollout.backends.cuda.ops`, which samples batches with top-n by
`rollout.backends.ops.sampling` instead. The tensors of a SamplingBatch must be contiguous. Shape
letters: S sample rows, P scored tokens, V vocabulary, C chunks of a row.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import triton
from torch import Tensor

from rollout.backends.cuda.layers import with_unit_stride
from rollout.backends.cuda.sampling_kernels import (
    chunk_statistics_kernel,
    draw_kernel,
    score_kernel,
)
from rollout.backends.cuda.truncation_kernels import (
    ROW_NUMBERS,
    candidates_kernel,
    histogram_kernel,
    kept_mass_kernel,
    threshold_kernel,
)
from rollout.backends.forward_batch import SamplingBatch
from rollout.step.output import SampleResult

CHUNK = 2048  # logits per program: one row of 150,000 still fills half an H100
ROW_CHUNK = 4096  # logits per iteration, if a program reads a whole row
ROW_WARPS = 8
# Room of a row's list of logits among which thresholds are searched, and logits per iteration. A
# list has tens to hundreds of logits; if more than ROOM, all logits of the row are searched.
ROOM = 4096
LIST_CHUNK = 1024


def sample(logits_SV: Tensor, sampling: SamplingBatch) -> SampleResult[Tensor]:
    """Draw one token per row by inverse CDF, with its log-prob if `sampling.any_logprobs`. The
    results are those of `rollout.backends.ops.sampling`, without top-n."""
    assert not sampling.top_n, "batches with top-n are sampled in torch"
    num_rows, device = logits_SV.shape[0], logits_SV.device
    result = SampleResult(
        token_ids_S=torch.empty(num_rows, dtype=torch.int64, device=device),
        is_finite_S=torch.empty(num_rows, dtype=torch.bool, device=device),
        logprobs_S=torch.empty(num_rows, dtype=torch.float32, device=device),
    )
    if num_rows:
        _sample_rows(with_unit_stride(logits_SV), sampling, result)
    return result if sampling.any_logprobs else replace(result, logprobs_S=None)


def _sample_rows(logits_SV: Tensor, sampling: SamplingBatch, result: SampleResult[Tensor]) -> None:
    num_rows, vocabulary = logits_SV.shape
    num_chunks = triton.cdiv(vocabulary, CHUNK)
    max_SC = torch.empty(num_rows, num_chunks, dtype=torch.float32, device=logits_SV.device)
    mass_SC, raw_mass_SC = (torch.empty_like(max_SC, dtype=torch.float64) for _ in range(2))
    logits = logits_SV, logits_SV.stride(0), vocabulary
    scale = sampling.temperature_S, sampling.mode_S
    chunk_statistics_kernel[(num_rows, num_chunks)](
        *(max_SC, mass_SC, raw_mass_SC, *logits, *scale), CHUNK=CHUNK
    )
    kept: tuple[Tensor | None, ...] = (None, None, None, None)
    if sampling.any_truncation:
        kept = truncate(logits_SV, max_SC, mass_SC, sampling)
    draw_kernel[(num_rows,)](
        *(result.token_ids_S, result.is_finite_S, result.logprobs_S, *kept, sampling.uniforms_S),
        *(max_SC, mass_SC, raw_mass_SC, *logits, num_chunks, *scale),
        TRUNCATES=sampling.any_truncation,
        CHUNK=CHUNK,
        CHUNKS=triton.next_power_of_2(num_chunks),
    )


def truncate(
    logits_SV: Tensor, max_SC: Tensor, mass_SC: Tensor, sampling: SamplingBatch
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return (kept mass per chunk, thresholds, ids of the last kept ties, min-p), as `draw_kernel`
    takes them."""
    num_rows, num_chunks = max_SC.shape
    logits = logits_SV, logits_SV.stride(0), logits_SV.shape[1]
    scale = sampling.temperature_S, sampling.mode_S
    threshold_S, largest_S = (torch.empty_like(sampling.temperature_S) for _ in range(2))
    last_tie_S = torch.empty_like(threshold_S, dtype=torch.int32)
    # The sum of a row's masses, each at most `unit`, stays below 2^63.
    unit = 2.0 ** (62 - logits_SV.shape[1].bit_length())
    histogram_SN = torch.zeros(num_rows, ROW_NUMBERS, dtype=torch.int64, device=logits_SV.device)
    candidates_SR = torch.empty(num_rows, ROOM, dtype=torch.int32, device=logits_SV.device)
    row = max_SC, *logits, num_chunks, *scale, sampling.top_k_S, sampling.top_p_S
    chunks = triton.next_power_of_2(num_chunks)
    histogram_kernel[(num_rows, num_chunks)](
        *(histogram_SN, *row, unit), CHUNK=CHUNK, CHUNKS=chunks
    )
    candidates_kernel[(num_rows, num_chunks)](
        *(candidates_SR, histogram_SN, *row), CHUNK=CHUNK, CHUNKS=chunks, ROOM=ROOM
    )
    threshold_kernel[(num_rows,)](
        *(threshold_S, last_tie_S, largest_S, candidates_SR, histogram_SN, *row, unit),
        CHUNK=LIST_CHUNK,
        CHUNKS=chunks,
        ROOM=ROOM,
    )
    kept_mass_SC = torch.empty_like(mass_SC)
    kept_mass_kernel[(num_rows, num_chunks)](
        *(kept_mass_SC, threshold_S, last_tie_S, largest_S, sampling.min_p_S, *logits, *scale),
        CHUNK=CHUNK,
    )
    return kept_mass_SC, threshold_S, last_tie_S, sampling.min_p_S


def score(logits_PV: Tensor, targets_P: Tensor) -> Tensor:
    """Return log_softmax(logits)[target], float32 [P], in one pass over the logits."""
    num_rows, vocabulary = logits_PV.shape
    logprobs_P = torch.empty(num_rows, dtype=torch.float32, device=logits_PV.device)
    if num_rows:
        logits_PV = with_unit_stride(logits_PV)
        score_kernel[(num_rows,)](
            *(logprobs_P, targets_P, logits_PV, logits_PV.stride(0), vocabulary),
            CHUNK=ROW_CHUNK,
            num_warps=ROW_WARPS,
        )
    return logprobs_P
