"""Triton kernels of top-k, top-p and min-p, launched by `rollout.backends.cuda.sampling`.

`rollout.backends.cuda.sampling_kernels` calls `kept_weights`. The kernels find a threshold for each
row by a histogram instead of a sort. Tokens are ranked by (logit descending, id ascending). So
top-k and then top-p keep all logits above a threshold, and the lowest ids of the logits equal to
it. Three launches find the threshold. The first sums count and mass of each row's logits in bins,
by their distance from the largest logit. The second lists the logits of the bins in which the
threshold must lie. The third searches the list. Masses are integers, so that sums do not depend on
their order. Shape letters: S sample rows, V vocabulary, C chunks of a row, E logits of one chunk, B
bins.
"""

from __future__ import annotations

import triton
import triton.language as tl

from rollout.backends.cuda.row import first, load_chunk, load_statistics, maximum, row_scale

LOWEST: tl.constexpr = tl.constexpr(-3.4028234663852886e38)  # of finite float32
# Distances from the largest logit fall into 32 bins an octave, from 2^-12 up to 2^20.
NUM_BINS = 1024
_BINS: tl.constexpr = tl.constexpr(NUM_BINS)
_BIN_SHIFT: tl.constexpr = tl.constexpr(18)  # leaves 5 bits of a float32's fraction
_FIRST_BIN: tl.constexpr = tl.constexpr((127 - 12) << 5)
# Numbers of a row: mass of each bin, count of each bin, and number of listed logits.
ROW_NUMBERS = 2 * NUM_BINS + 1
_ROW_NUMBERS: tl.constexpr = tl.constexpr(ROW_NUMBERS)


@triton.jit
def histogram_kernel(
    histogram_ptr, max_ptr, logits_ptr, row_stride, vocabulary, num_chunks, temperature_ptr,
    mode_ptr, top_k_ptr, top_p_ptr, unit, CHUNK: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """Add one chunk of one row to the row's histogram, which the caller has set to zero. `unit` is
    the integer for a mass of 1. Does nothing for a row that neither top-k nor top-p cuts. Logits of
    -inf are not counted."""
    row, chunk = tl.program_id(0), tl.program_id(1)
    inverse, has_k, has_p = _cuts(temperature_ptr, mode_ptr, top_k_ptr, top_p_ptr, row, vocabulary)
    if (has_k | has_p) == 0:
        return
    largest = maximum(load_statistics(max_ptr, row, num_chunks, -float("inf"), CHUNKS))
    x_E = load_chunk(logits_ptr + row.to(tl.int64) * row_stride, chunk, vocabulary, CHUNK)
    is_token_E = x_E >= LOWEST
    bin_E = _bin_of(x_E, largest)
    mass_E = _mass_of(x_E, largest, inverse, unit)
    row_ptr = histogram_ptr + row.to(tl.int64) * _ROW_NUMBERS
    tl.atomic_add(row_ptr + bin_E, mass_E, mask=is_token_E & (mass_E > 0), sem="relaxed")
    count_B = tl.histogram(bin_E, _BINS, mask=is_token_E)
    counts_B = row_ptr + _BINS + tl.arange(0, _BINS)
    tl.atomic_add(counts_B, count_B.to(tl.int64), mask=count_B > 0, sem="relaxed")


@triton.jit
def candidates_kernel(
    candidates_ptr, histogram_ptr, max_ptr, logits_ptr, row_stride, vocabulary, num_chunks,
    temperature_ptr, mode_ptr, top_k_ptr, top_p_ptr,
    CHUNK: tl.constexpr, CHUNKS: tl.constexpr, ROOM: tl.constexpr,
):  # fmt: skip
    """Append one chunk's ids in the bins that can hold the row's threshold to the row's list. The
    list has any order, and at most ROOM ids. The last number of the row's histogram counts all such
    ids, also ids without room."""
    row, chunk = tl.program_id(0), tl.program_id(1)
    _, has_k, has_p = _cuts(temperature_ptr, mode_ptr, top_k_ptr, top_p_ptr, row, vocabulary)
    if (has_k | has_p) == 0:
        return
    row_ptr = histogram_ptr + row.to(tl.int64) * _ROW_NUMBERS
    first_bin, last_bin, _, _, _, _ = _bins_of_thresholds(
        row_ptr, top_k_ptr, top_p_ptr, row, has_k, has_p
    )
    largest = maximum(load_statistics(max_ptr, row, num_chunks, -float("inf"), CHUNKS))
    x_E = load_chunk(logits_ptr + row.to(tl.int64) * row_stride, chunk, vocabulary, CHUNK)
    bin_E = _bin_of(x_E, largest)
    is_listed_E = (x_E >= LOWEST) & (bin_E >= first_bin) & (bin_E <= last_bin)
    rank_E = tl.cumsum(is_listed_E.to(tl.int32))
    num_listed = tl.sum(is_listed_E.to(tl.int64))
    if num_listed > 0:
        place = tl.atomic_add(row_ptr + 2 * _BINS, num_listed, sem="relaxed")
        place_E = place + rank_E - 1
        ids_E = chunk * CHUNK + tl.arange(0, CHUNK)
        list_ptr = candidates_ptr + row.to(tl.int64) * ROOM
        tl.store(list_ptr + place_E, ids_E, mask=is_listed_E & (place_E < ROOM))


@triton.jit
def threshold_kernel(
    threshold_ptr, last_tie_ptr, largest_ptr, candidates_ptr, histogram_ptr, max_ptr, logits_ptr,
    row_stride, vocabulary, num_chunks, temperature_ptr, mode_ptr, top_k_ptr, top_p_ptr, unit,
    CHUNK: tl.constexpr, CHUNKS: tl.constexpr, ROOM: tl.constexpr,
):  # fmt: skip
    """Store one row's threshold, `last_tie` and largest logit. Top-k and top-p keep logits above
    the threshold, and logits equal to it up to the id `last_tie`. Searches the row's list, or the
    whole row if more than ROOM ids were counted."""
    row = tl.program_id(0)
    inverse, has_k, has_p = _cuts(temperature_ptr, mode_ptr, top_k_ptr, top_p_ptr, row, vocabulary)
    largest = maximum(load_statistics(max_ptr, row, num_chunks, -float("inf"), CHUNKS))
    threshold = tl.full([], LOWEST, tl.float32)
    last_tie = tl.zeros([], tl.int32) + vocabulary
    if has_k | has_p:
        row_ptr = histogram_ptr + row.to(tl.int64) * _ROW_NUMBERS
        first_bin, last_bin, num_before, mass_before, mass, has_k = _bins_of_thresholds(
            row_ptr, top_k_ptr, top_p_ptr, row, has_k, has_p
        )
        num_listed = tl.load(row_ptr + 2 * _BINS)
        is_list = num_listed <= ROOM
        size = tl.where(is_list, num_listed, vocabulary).to(tl.int32)
        logits_ptr += row.to(tl.int64) * row_stride
        candidates_ptr += row.to(tl.int64) * ROOM
        num_ties = tl.zeros([], tl.int64) + vocabulary
        if has_k:
            goal = tl.load(top_k_ptr + row) - num_before
            threshold = _search(
                logits_ptr, candidates_ptr, is_list, size, first_bin, last_bin, largest, inverse,
                unit, threshold, goal, False, CHUNK,
            )  # fmt: skip
            num_above, mass_above = _above(
                logits_ptr, candidates_ptr, is_list, size, first_bin, last_bin, largest, inverse,
                unit, threshold, CHUNK,
            )  # fmt: skip
            num_ties = goal - num_above
            mass = mass_before + mass_above + num_ties * _mass_of(threshold, largest, inverse, unit)
        if has_p:
            goal = _part_of(tl.load(top_p_ptr + row), mass) - mass_before
            of_top_k = threshold
            threshold = _search(
                logits_ptr, candidates_ptr, is_list, size, first_bin, last_bin, largest, inverse,
                unit, of_top_k, goal, True, CHUNK,
            )  # fmt: skip
            _, mass_above = _above(
                logits_ptr, candidates_ptr, is_list, size, first_bin, last_bin, largest, inverse,
                unit, threshold, CHUNK,
            )  # fmt: skip
            # The tie that crosses the goal is kept, and always a row's most probable token.
            weight = tl.maximum(_mass_of(threshold, largest, inverse, unit), 1)
            needed = tl.maximum((goal - mass_above + weight - 1) // weight, 1)
            num_ties = tl.where(threshold > of_top_k, needed, tl.minimum(needed, num_ties))
        last_tie = _nth_tie(
            logits_ptr, candidates_ptr, is_list, size, vocabulary, threshold, num_ties, CHUNK
        )
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
    """Store the sum of exp((x - row's largest) / temperature) over one chunk's kept tokens."""
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
    """Return the weights, with zeros for dropped tokens. Weights are relative to the row's largest
    logit, so min-p drops weights below `min_p`."""
    threshold = tl.load(threshold_ptr + row)
    ids_E = chunk * CHUNK + tl.arange(0, CHUNK)
    is_ranked_E = (x_E == threshold) & (ids_E <= tl.load(last_tie_ptr + row))
    is_ranked_E = is_ranked_E | (x_E > threshold)
    min_p = tl.where(is_greedy, 0.0, tl.load(min_p_ptr + row))
    return tl.where(is_ranked_E & (weight_E >= min_p), weight_E, 0.0)


@triton.jit
def _cuts(temperature_ptr, mode_ptr, top_k_ptr, top_p_ptr, row, vocabulary):
    """Return (1 / temperature, whether top-k cuts the row, whether top-p cuts the row)."""
    inverse, _, is_greedy = row_scale(temperature_ptr, mode_ptr, row)
    top_k, top_p = tl.load(top_k_ptr + row), tl.load(top_p_ptr + row)
    has_k = (top_k > 0) & (top_k < vocabulary) & (is_greedy == 0)
    return inverse, has_k, (top_p > 0.0) & (top_p < 1.0) & (is_greedy == 0)


@triton.jit
def _bin_of(x_E, largest):
    """Return each logit's bin. Bin 0 is next to the largest logit. Logits that are not finite get a
    valid bin, too."""
    bits_E = (largest - x_E).to(tl.int32, bitcast=True)
    return tl.minimum(tl.maximum((bits_E >> _BIN_SHIFT) - _FIRST_BIN, 0), _BINS - 1)


@triton.jit
def _mass_of(x, largest, inverse, unit):
    """Return exp((x - largest) / temperature) times `unit`, rounded down to int64."""
    return (tl.exp((x - largest) * inverse).to(tl.float64) * unit).to(tl.int64)


@triton.jit
def _part_of(top_p, mass):
    """Return the least integer that is at least `top_p` times `mass`."""
    return tl.ceil(top_p.to(tl.float64) * mass.to(tl.float64)).to(tl.int64)


@triton.jit
def _bins_of_thresholds(row_ptr, top_k_ptr, top_p_ptr, row, has_k, has_p):
    """Return the bins that can hold the threshold, and sums of the bins before them. Returns (first
    bin, last bin, count and mass of the bins before the first, mass of the row, whether top-k cuts
    the row). The last value is computed again without logits of -inf."""
    # Top-p is a share of the mass that top-k keeps. Here only a lower bound of this mass is known:
    # the mass of the bins before the k-th token's bin.
    bins_B = tl.arange(0, _BINS)
    mass_B = tl.load(row_ptr + bins_B)
    count_B = tl.load(row_ptr + _BINS + bins_B)
    mass = tl.sum(mass_B)
    top_k = tl.load(top_k_ptr + row)
    has_k = has_k & (top_k < tl.sum(count_B))
    bin_of_k = first(tl.cumsum(count_B) >= top_k, _BINS)
    mass_of_k = tl.where(has_k, tl.sum(tl.where(bins_B < bin_of_k, mass_B, 0)), mass)
    goal = _part_of(tl.load(top_p_ptr + row), mass_of_k)
    bin_of_p = first(tl.cumsum(mass_B) >= goal, _BINS)
    first_bin = tl.where(has_p, bin_of_p, bin_of_k)
    last_bin = tl.where(has_k, bin_of_k, bin_of_p)
    num_before = tl.sum(tl.where(bins_B < first_bin, count_B, 0))
    mass_before = tl.sum(tl.where(bins_B < first_bin, mass_B, 0))
    return first_bin, last_bin, num_before, mass_before, mass, has_k


@triton.jit
def _load_listed(logits_ptr, candidates_ptr, is_list, size, start, CHUNK: tl.constexpr):
    """Return CHUNK (logits, ids) from `start` on, of the list or else of the row; -inf beyond the
    end."""
    ids_E = start + tl.arange(0, CHUNK)
    is_here_E = ids_E < size
    ids_E = tl.load(candidates_ptr + ids_E, mask=is_here_E & is_list, other=0) + tl.where(
        is_list, 0, ids_E
    )
    x_E = tl.load(logits_ptr + ids_E, mask=is_here_E, other=-float("inf")).to(tl.float32)
    return x_E, ids_E


@triton.jit
def _load_in_bins(
    logits_ptr, candidates_ptr, is_list, size, start, first_bin, last_bin, largest,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """Return CHUNK logits from `start` on, of the list or else of the row; -inf outside the
    bins."""
    x_E, _ = _load_listed(logits_ptr, candidates_ptr, is_list, size, start, CHUNK)
    bin_E = _bin_of(x_E, largest)
    return tl.where((bin_E >= first_bin) & (bin_E <= last_bin), x_E, -float("inf"))


@triton.jit
def _search(
    logits_ptr, candidates_ptr, is_list, size, first_bin, last_bin, largest, inverse, unit, low,
    goal, BY_MASS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Return the largest logit such that at least `goal` logits are equal to it or larger. With
    BY_MASS, the mass of these logits must be at least `goal`. `low` must be a number for which the
    condition holds."""
    # Bisects values, not ranks. Each pass moves a bound onto an existing logit, so that the search
    # ends with an exact logit.
    high = largest
    while low < high:
        middle = 0.5 * low + 0.5 * high
        middle = tl.where(middle > low, middle, high)
        measure_E = tl.zeros([CHUNK], tl.int64)
        above_E = tl.full([CHUNK], float("inf"), tl.float32)
        below_E = tl.full([CHUNK], -float("inf"), tl.float32)
        start = 0
        while start < size:
            x_E = _load_in_bins(
                logits_ptr, candidates_ptr, is_list, size, start, first_bin, last_bin, largest,
                CHUNK,
            )  # fmt: skip
            is_above_E = x_E >= middle
            if BY_MASS:
                mass_E = _mass_of(x_E, largest, inverse, unit)
                measure_E += tl.where(is_above_E, mass_E, 0)
            else:
                measure_E += is_above_E.to(tl.int64)
            above_E = tl.minimum(above_E, tl.where(is_above_E, x_E, float("inf")))
            below_E = tl.maximum(below_E, tl.where(is_above_E, -float("inf"), x_E))
            start += CHUNK
        reaches = tl.sum(measure_E) >= goal
        low = tl.where(reaches, tl.min(above_E), low)
        high = tl.where(reaches, high, tl.max(below_E))
    return low


@triton.jit
def _above(
    logits_ptr, candidates_ptr, is_list, size, first_bin, last_bin, largest, inverse, unit,
    threshold, CHUNK: tl.constexpr,
):  # fmt: skip
    """Return number and mass, int64, of the logits above the threshold within the bins."""
    count_E = tl.zeros([CHUNK], tl.int64)
    mass_E = tl.zeros([CHUNK], tl.int64)
    start = 0
    while start < size:
        x_E = _load_in_bins(
            logits_ptr, candidates_ptr, is_list, size, start, first_bin, last_bin, largest, CHUNK
        )
        is_above_E = x_E > threshold
        count_E += is_above_E.to(tl.int64)
        mass_E += tl.where(is_above_E, _mass_of(x_E, largest, inverse, unit), 0)
        start += CHUNK
    return tl.sum(count_E), tl.sum(mass_E)


@triton.jit
def _nth_tie(
    logits_ptr, candidates_ptr, is_list, size, vocabulary, threshold, num_ties, CHUNK: tl.constexpr
):
    """Return the id up to which there are `num_ties` logits equal to the threshold, by bisection.
    Return the vocabulary size if there are no more than `num_ties`."""
    low = tl.zeros([], tl.int32) - 1  # up to this id there are fewer than `num_ties`
    high = tl.zeros([], tl.int32) + vocabulary
    middle = high - 1
    while high - low > 1:
        num_E = tl.zeros([CHUNK], tl.int64)
        start = 0
        while start < size:
            x_E, ids_E = _load_listed(logits_ptr, candidates_ptr, is_list, size, start, CHUNK)
            num_E += ((x_E == threshold) & (ids_E <= middle)).to(tl.int64)
            start += CHUNK
        num_up_to = tl.sum(num_E)
        # The row has no more ties than may be kept.
        is_all = (middle == vocabulary - 1) & (num_up_to <= num_ties)
        reaches = (num_up_to >= num_ties) & (is_all == 0)
        high = tl.where(reaches, middle, high)
        low = tl.where(reaches, low, tl.where(is_all, vocabulary - 1, middle))
        middle = (low + high) // 2
    return high
