"""Triton functions on one row of logits.

Called by the kernels of `rollout.backends.cuda.sampling_kernels` and
`rollout.backends.cuda.truncation_kernels`. Shape letters: C chunks of a row, E elements of one
block (logits or chunks).
"""

from __future__ import annotations

import triton
import triton.language as tl

from rollout.backends.forward_batch import MODE_CODES

RAW: tl.constexpr = tl.constexpr(MODE_CODES["raw"])
PROCESSED: tl.constexpr = tl.constexpr(MODE_CODES["processed"])


@triton.jit
def row_scale(temperature_ptr, mode_ptr, row):
    """Return (1 / temperature, whether the row reports raw log-probs, whether the row is greedy).
    The first is 1 if the row is greedy."""
    temperature = tl.load(temperature_ptr + row)
    is_greedy = temperature == 0.0
    is_raw = (tl.load(mode_ptr + row) == RAW) | is_greedy
    return tl.div_rn(1.0, tl.where(is_greedy, 1.0, temperature)), is_raw, is_greedy


@triton.jit
def load_chunk(row_ptr, chunk, vocabulary, CHUNK: tl.constexpr):
    """Return logits [chunk * CHUNK, (chunk + 1) * CHUNK) of a row, float32; -inf beyond its end."""
    offsets_E = chunk * CHUNK + tl.arange(0, CHUNK)
    x_E = tl.load(row_ptr + offsets_E, mask=offsets_E < vocabulary, other=-float("inf"))
    return x_E.to(tl.float32)


@triton.jit
def load_statistics(ptr, row, num_chunks, other, CHUNKS: tl.constexpr):
    """Return one number per chunk of a row; `other` beyond the row's last chunk."""
    chunks_C = tl.arange(0, CHUNKS)
    offsets_C = row.to(tl.int64) * num_chunks + chunks_C
    return tl.load(ptr + offsets_C, mask=chunks_C < num_chunks, other=other)


@triton.jit
def load_masses(max_C, largest, mass_ptr, row, num_chunks, inverse, CHUNKS: tl.constexpr):
    """Return sums of exp((x - largest) / temperature) per chunk, float64. `mass_ptr` has sums
    relative to each chunk's own maximum `max_C`. `inverse` is 1 / temperature."""
    mass_C = load_statistics(mass_ptr, row, num_chunks, 0.0, CHUNKS)
    # exp in float32: a chunk has mass if and only if the weight of its largest logit is above 0.
    return tl.exp((max_C - largest) * inverse).to(tl.float64) * mass_C


@triton.jit
def maximum(x_E):
    """Return the maximum; NaN if there is a NaN."""
    num_nans = tl.sum((x_E != x_E).to(tl.int32))
    return tl.where(num_nans > 0, float("nan"), tl.max(x_E))


@triton.jit
def first(is_match_E, SIZE: tl.constexpr):
    """Return the lowest matching index; SIZE - 1 if there is none."""
    return tl.min(tl.where(is_match_E, tl.arange(0, SIZE), SIZE - 1))


@triton.jit
def locate(mass_E, target, SIZE: tl.constexpr):
    """Return the first index with mass whose cumulative mass exceeds the target, and the target
    minus the mass before this index. If rounding put the target at or above the sum, return the
    last index with mass."""
    offsets_E = tl.arange(0, SIZE)
    cumulative_E = tl.cumsum(mass_E)
    # A parallel sum need not be monotonic to the last bit. Without the first condition, an index
    # without mass could be the first to exceed the target.
    crosses_E = (mass_E > 0.0) & (cumulative_E > target)
    last = tl.max(tl.where(mass_E > 0.0, offsets_E, 0))
    index = tl.minimum(first(crosses_E, SIZE), last)
    before = tl.sum(tl.where(offsets_E == index, cumulative_E - mass_E, 0.0))
    return index, target - before
