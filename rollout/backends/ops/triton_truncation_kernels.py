"""Kernels of truncation: a threshold per row, found by search in place of a sort.

Tokens are ranked by (logit descending, id ascending), so what top-k and then top-p leave is every
logit above some value, and of those equal to it the lowest ids. Shape letters: S sample rows, V
vocabulary, C chunks of a row, E logits of one chunk.
"""

from __future__ import annotations

import triton
import triton.language as tl

from rollout.backends.ops.triton_row import load_chunk, row_scale, total_mass

LOWEST: tl.constexpr = tl.constexpr(-3.4028234663852886e38)  # of finite float32


@triton.jit
def threshold_kernel(
    threshold_ptr,
    last_tie_ptr,
    largest_ptr,
    max_ptr,
    mass_ptr,
    logits_ptr,
    row_stride,
    vocabulary,
    num_chunks,
    temperature_ptr,
    mode_ptr,
    top_k_ptr,
    top_p_ptr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    """What top-k and top-p leave of one row: logits above the threshold, and equal ones up to the
    id `last_tie`. Also the row's largest logit.
    """
    row = tl.program_id(0)
    inverse, _, is_greedy = row_scale(temperature_ptr, mode_ptr, row)
    is_sampled = is_greedy == 0
    largest, mass = total_mass(max_ptr, mass_ptr, row, num_chunks, inverse, CHUNKS)
    top_k = tl.load(top_k_ptr + row)
    top_p = tl.load(top_p_ptr + row)
    logits_ptr += row.to(tl.int64) * row_stride
    threshold = tl.full([], LOWEST, tl.float32)
    num_ties = tl.zeros([], tl.float64) + vocabulary
    if (top_k > 0) & (top_k < vocabulary) & is_sampled:
        goal = top_k.to(tl.float64)
        threshold = _search(logits_ptr, vocabulary, largest, inverse, threshold, goal, False, CHUNK)
        num_above, mass_above = _above(logits_ptr, vocabulary, largest, inverse, threshold, CHUNK)
        num_ties = goal - num_above
        mass = mass_above + num_ties * tl.exp((threshold - largest) * inverse).to(tl.float64)
    if (top_p > 0.0) & (top_p < 1.0) & is_sampled:
        goal = top_p.to(tl.float64) * mass
        of_top_k = threshold
        threshold = _search(logits_ptr, vocabulary, largest, inverse, of_top_k, goal, True, CHUNK)
        _count, mass_above = _above(logits_ptr, vocabulary, largest, inverse, threshold, CHUNK)
        weight = tl.exp((threshold - largest) * inverse).to(tl.float64)
        # The tie that crosses the goal is kept, and so is a row's most probable token.
        needed = tl.ceil((goal - mass_above) / tl.where(weight > 0.0, weight, 1.0))
        needed = tl.maximum(needed, 1.0)
        num_ties = tl.where(threshold > of_top_k, needed, tl.minimum(needed, num_ties))
    last_tie = _nth_tie(logits_ptr, vocabulary, threshold, num_ties, CHUNK)
    tl.store(threshold_ptr + row, threshold)
    tl.store(last_tie_ptr + row, last_tie)
    tl.store(largest_ptr + row, largest)


@triton.jit
def kept_mass_kernel(
    kept_mass_ptr,
    threshold_ptr,
    last_tie_ptr,
    largest_ptr,
    min_p_ptr,
    logits_ptr,
    row_stride,
    vocabulary,
    temperature_ptr,
    mode_ptr,
    CHUNK: tl.constexpr,
):
    """Sum of exp((x - row's largest) / temperature) over what truncation leaves of one chunk."""
    row, chunk = tl.program_id(0), tl.program_id(1)
    inverse, _, is_greedy = row_scale(temperature_ptr, mode_ptr, row)
    logits_ptr += row.to(tl.int64) * row_stride
    x_E = load_chunk(logits_ptr, chunk, vocabulary, CHUNK)
    weight_E = tl.exp((x_E - tl.load(largest_ptr + row)) * inverse)
    kept_E = kept_weights(
        x_E, weight_E, chunk, row, is_greedy, threshold_ptr, last_tie_ptr, min_p_ptr, CHUNK
    )
    out = row.to(tl.int64) * tl.num_programs(1) + chunk
    tl.store(kept_mass_ptr + out, tl.sum(kept_E.to(tl.float64)))


@triton.jit
def kept_weights(
    x_E,
    weight_E,
    chunk,
    row,
    is_greedy,
    threshold_ptr,
    last_tie_ptr,
    min_p_ptr,
    CHUNK: tl.constexpr,
):
    """The weights with zeros for dropped tokens. Weights are relative to the row's largest logit,
    so min-p drops those below `min_p` itself.
    """
    threshold = tl.load(threshold_ptr + row)
    ids_E = chunk * CHUNK + tl.arange(0, CHUNK)
    is_ranked_E = (x_E == threshold) & (ids_E <= tl.load(last_tie_ptr + row))
    is_ranked_E = is_ranked_E | (x_E > threshold)
    min_p = tl.where(is_greedy, 0.0, tl.load(min_p_ptr + row))
    return tl.where(is_ranked_E & (weight_E >= min_p), weight_E, 0.0)


@triton.jit
def _search(
    row_ptr,
    vocabulary,
    largest,
    inverse,
    low,
    goal,
    BY_MASS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """The largest logit such that it and all larger ones have `goal` tokens (or mass) at least.

    `low` is taken to reach the goal. Bisects values, not ranks; each pass moves a bound onto a
    logit that is there, so it ends with equality, exactly.
    """
    high = largest
    while low < high:
        middle = 0.5 * low + 0.5 * high
        middle = tl.where(middle > low, middle, high)
        measure_E = tl.zeros([CHUNK], tl.float64)
        above_E = tl.full([CHUNK], float("inf"), tl.float32)
        below_E = tl.full([CHUNK], -float("inf"), tl.float32)
        chunk = 0
        while chunk * CHUNK < vocabulary:
            x_E = load_chunk(row_ptr, chunk, vocabulary, CHUNK)
            is_above_E = x_E >= middle
            if BY_MASS:
                weight_E = tl.exp((x_E - largest) * inverse)
                measure_E += tl.where(is_above_E, weight_E, 0.0).to(tl.float64)
            else:
                measure_E += is_above_E.to(tl.float64)
            above_E = tl.minimum(above_E, tl.where(is_above_E, x_E, float("inf")))
            below_E = tl.maximum(below_E, tl.where(is_above_E, -float("inf"), x_E))
            chunk += 1
        reaches = tl.sum(measure_E) >= goal
        low = tl.where(reaches, tl.min(above_E), low)
        high = tl.where(reaches, high, tl.max(below_E))
    return low


@triton.jit
def _above(row_ptr, vocabulary, largest, inverse, threshold, CHUNK: tl.constexpr):
    """(number of logits above the threshold, their mass), float64."""
    count_E = tl.zeros([CHUNK], tl.float64)
    mass_E = tl.zeros([CHUNK], tl.float64)
    chunk = 0
    while chunk * CHUNK < vocabulary:
        x_E = load_chunk(row_ptr, chunk, vocabulary, CHUNK)
        is_above_E = x_E > threshold
        weight_E = tl.exp((x_E - largest) * inverse)
        count_E += is_above_E.to(tl.float64)
        mass_E += tl.where(is_above_E, weight_E, 0.0).to(tl.float64)
        chunk += 1
    return tl.sum(count_E), tl.sum(mass_E)


@triton.jit
def _nth_tie(row_ptr, vocabulary, threshold, num_ties, CHUNK: tl.constexpr):
    """Id of the last of the first `num_ties` logits equal to the threshold; V if they are fewer."""
    seen = tl.zeros([], tl.int32)
    last = seen + vocabulary
    chunk = 0
    while (chunk * CHUNK < vocabulary) & (seen < num_ties) & (num_ties < vocabulary):
        x_E = load_chunk(row_ptr, chunk, vocabulary, CHUNK)
        is_tie_E = x_E == threshold
        rank_E = seen + tl.cumsum(is_tie_E.to(tl.int32))
        is_last_E = is_tie_E & (rank_E == num_ties)
        ids_E = chunk * CHUNK + tl.arange(0, CHUNK)
        last = tl.minimum(last, tl.min(tl.where(is_last_E, ids_E, vocabulary)))
        seen += tl.sum(is_tie_E.to(tl.int32))
        chunk += 1
    return last
