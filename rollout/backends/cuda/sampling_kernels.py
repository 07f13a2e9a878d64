"""Triton kernels of sampling and scoring, launched by `rollout.backends.cuda.sampling`.

Without truncation they read the logits once, and one chunk of each row a second time. Weights are
float32, sums float64. A row with numbers that are not finite gets meaningless results, but no
kernel reads or writes out of bounds. Shape letters: S sample rows, P scored tokens, V vocabulary, C
chunks of a row, E logits of one chunk.
"""

from __future__ import annotations

import triton
import triton.language as tl

from rollout.backends.cuda.row import (
    PROCESSED,
    first,
    load_chunk,
    load_masses,
    load_statistics,
    locate,
    maximum,
    row_scale,
)
from rollout.backends.cuda.truncation_kernels import kept_weights


@triton.jit
def chunk_statistics_kernel(
    max_ptr,
    mass_ptr,
    raw_mass_ptr,
    logits_ptr,
    row_stride,
    vocabulary,
    temperature_ptr,
    mode_ptr,
    CHUNK: tl.constexpr,
):
    """Store one chunk's largest logit, the sum of exp((x - largest) / temperature), and a raw sum.
    The largest is NaN if there is a NaN. The raw sum is of exp(x - largest) in rows that report raw
    log-probs. In other rows it equals the first sum."""
    row, chunk = tl.program_id(0), tl.program_id(1)
    inverse, is_raw, _ = row_scale(temperature_ptr, mode_ptr, row)
    logits_ptr += row.to(tl.int64) * row_stride
    x_E = load_chunk(logits_ptr, chunk, vocabulary, CHUNK)
    largest = maximum(x_E)
    shifted_E = x_E - tl.where(largest == -float("inf"), 0.0, largest)
    mass = tl.sum(tl.exp(shifted_E * inverse).to(tl.float64))
    raw_mass = mass
    if is_raw & (inverse != 1.0):
        raw_mass = tl.sum(tl.exp(shifted_E).to(tl.float64))
    out = row.to(tl.int64) * tl.num_programs(1) + chunk
    tl.store(max_ptr + out, largest)
    tl.store(mass_ptr + out, mass)
    tl.store(raw_mass_ptr + out, raw_mass)


@triton.jit
def draw_kernel(
    token_ptr,
    is_finite_ptr,
    logprob_ptr,
    kept_mass_ptr,
    threshold_ptr,
    last_tie_ptr,
    min_p_ptr,
    uniform_ptr,
    max_ptr,
    mass_ptr,
    raw_mass_ptr,
    logits_ptr,
    row_stride,
    vocabulary,
    num_chunks,
    temperature_ptr,
    mode_ptr,
    TRUNCATES: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    """Draw one row's token. Store the token, whether the row is finite, and the log-prob. CHUNKS is
    `num_chunks` rounded up to a power of two. Without TRUNCATES the pointers from `kept_mass_ptr`
    to `min_p_ptr` are None."""
    row = tl.program_id(0)
    inverse, is_raw, is_greedy = row_scale(temperature_ptr, mode_ptr, row)
    logits_ptr += row.to(tl.int64) * row_stride
    max_C = load_statistics(max_ptr, row, num_chunks, -float("inf"), CHUNKS)
    largest = maximum(max_C)
    mass_C = load_masses(max_C, largest, mass_ptr, row, num_chunks, inverse, CHUNKS)
    total = tl.sum(mass_C)
    if TRUNCATES:
        mass_C = load_statistics(kept_mass_ptr, row, num_chunks, 0.0, CHUNKS)
    kept_total = tl.sum(mass_C)
    chunk, rest = locate(mass_C, tl.load(uniform_ptr + row) * kept_total, CHUNKS)
    chunk = tl.where(is_greedy, first(max_C == largest, CHUNKS), chunk)

    x_E = load_chunk(logits_ptr, chunk, vocabulary, CHUNK)
    weight_E = tl.exp((x_E - largest) * inverse)
    if TRUNCATES:
        weight_E = kept_weights(
            x_E, weight_E, chunk, row, is_greedy, threshold_ptr, last_tie_ptr, min_p_ptr, CHUNK
        )
    offset, _ = locate(weight_E.to(tl.float64), rest, CHUNK)
    offset = tl.where(is_greedy, first(x_E == largest, CHUNK), offset)
    chosen = tl.sum(tl.where(tl.arange(0, CHUNK) == offset, x_E, 0.0))
    if is_raw:
        inverse = 1.0
        total = tl.sum(load_masses(max_C, largest, raw_mass_ptr, row, num_chunks, 1.0, CHUNKS))
    elif tl.load(mode_ptr + row) == PROCESSED:
        total = kept_total
    is_finite = tl.abs(largest) < float("inf")
    tl.store(token_ptr + row, tl.where(is_finite, chunk * CHUNK + offset, 0).to(tl.int64))
    tl.store(is_finite_ptr + row, is_finite)
    tl.store(logprob_ptr + row, (chosen - largest) * inverse - tl.log(total).to(tl.float32))


@triton.jit
def score_kernel(logprob_ptr, target_ptr, logits_ptr, row_stride, vocabulary, CHUNK: tl.constexpr):
    """Store log_softmax of one row at its target; NaN for a target outside the vocabulary."""
    row = tl.program_id(0)
    logits_ptr += row.to(tl.int64) * row_stride
    largest = -float("inf")
    total = tl.zeros([], tl.float64)
    chunk = 0
    while chunk * CHUNK < vocabulary:
        x_E = load_chunk(logits_ptr, chunk, vocabulary, CHUNK)
        before = largest
        largest = tl.maximum(before, tl.max(x_E))
        base = tl.where(largest == -float("inf"), 0.0, largest)
        total *= tl.exp(before - base).to(tl.float64)
        total += tl.sum(tl.exp(x_E - base).to(tl.float64))
        chunk += 1
    target = tl.load(target_ptr + row)
    is_token = (target >= 0) & (target < vocabulary)
    chosen = tl.load(logits_ptr + target, mask=is_token, other=float("nan")).to(tl.float32)
    tl.store(logprob_ptr + row, chosen - largest - tl.log(total).to(tl.float32))
