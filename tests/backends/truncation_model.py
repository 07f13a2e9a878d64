"""The thresholds of top-k and top-p as the kernels find them, for many rows at once in NumPy.

The same three steps in the same numbers: a histogram of counts and whole masses, the list of what
lies in the bins of the thresholds, a search in that list. A sort stands for the search by
bisection, whose outcome is the same logit. Shape letters: S rows, V vocabulary, B bins.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rollout.backends.cuda.truncation_kernels import NUM_BINS
from rollout.backends.forward_batch import SamplingBatch

LOWEST = np.finfo(np.float32).min
FIRST_BIN, BIN_SHIFT = (127 - 12) << 5, 18

Ints = NDArray[np.int64]
Floats = NDArray[np.float32]
Flags = NDArray[np.bool_]


class Bins(NamedTuple):
    """The bins of the thresholds, and count and mass of the bins before; all [S]."""

    first: Ints
    last: Ints
    num_before: Ints
    mass_before: Ints
    mass: Ints
    has_k: Flags


def thresholds(x_SV: Floats, sampling: SamplingBatch) -> tuple[Floats, Ints]:
    """(threshold, id of the last tie) of each row [S]: kept are logits above the threshold and
    equal ones up to that id. Rows without a cut: the lowest number, V. No row is greedy.
    """
    vocabulary = x_SV.shape[1]
    top_k_S, top_p_S = sampling.top_k_S.numpy(), sampling.top_p_S.numpy()
    inverse_S1 = np.float32(1) / sampling.temperature_S.numpy()[:, None]
    largest_S1 = x_SV.max(1, keepdims=True)
    scale = largest_S1, inverse_S1, 2.0 ** (62 - vocabulary.bit_length())
    has_k_S, has_p_S = (top_k_S > 0) & (top_k_S < vocabulary), (top_p_S > 0) & (top_p_S < 1)
    is_cut_S, mass_SV, bin_SV = has_k_S | has_p_S, mass_of(x_SV, *scale), bins_of(x_SV, largest_S1)
    bins = bins_of_thresholds(bin_SV, mass_SV, x_SV >= LOWEST, top_k_S, top_p_S, has_k_S, has_p_S)
    is_listed_SV = (bin_SV >= bins.first[:, None]) & (bin_SV <= bins.last[:, None])
    x_SV = np.where((x_SV >= LOWEST) & is_listed_SV, x_SV, -np.inf)
    mass_SV = np.where(x_SV >= LOWEST, mass_SV, 0)

    of_top_k_S, goal_S = np.full(len(x_SV), LOWEST), top_k_S - bins.num_before
    found_S = search(x_SV, (x_SV >= LOWEST).astype(np.int64), of_top_k_S, goal_S)
    of_top_k_S = np.where(bins.has_k, found_S, of_top_k_S)
    is_above_SV = x_SV > of_top_k_S[:, None]
    num_ties_S = np.where(bins.has_k, goal_S - is_above_SV.sum(1), vocabulary)
    with np.errstate(over="ignore"):  # where there is no top-k, and the sum is not used
        of_ties_S = num_ties_S * mass_of(of_top_k_S[:, None], *scale)[:, 0]
        mass_of_k_S = bins.mass_before + (mass_SV * is_above_SV).sum(1) + of_ties_S
    goal_S = part_of(top_p_S, np.where(bins.has_k, mass_of_k_S, bins.mass)) - bins.mass_before
    threshold_S = np.where(has_p_S, search(x_SV, mass_SV, of_top_k_S, goal_S), of_top_k_S)
    weight_S = np.maximum(mass_of(threshold_S[:, None], *scale)[:, 0], 1)
    mass_above_S = (mass_SV * (x_SV > threshold_S[:, None])).sum(1)
    needed_S = np.maximum((goal_S - mass_above_S + weight_S - 1) // weight_S, 1)
    of_p_S = np.where(threshold_S > of_top_k_S, needed_S, np.minimum(needed_S, num_ties_S))
    last_S = last_ties(x_SV == threshold_S[:, None], np.where(has_p_S, of_p_S, num_ties_S))
    return np.where(is_cut_S, threshold_S, LOWEST), np.where(is_cut_S, last_S, vocabulary)


def mass_of(x_SV: Floats, largest_S1: Floats, inverse_S1: Floats, unit: float) -> Ints:
    """Return masses in whole units; exponentials are float32."""
    with np.errstate(over="ignore"):  # below the least number there is -inf, which weighs 0
        weight_SV = np.exp((x_SV - largest_S1) * inverse_S1).astype(np.float64)
    return (weight_SV * unit).astype(np.int64)


def bins_of(x_SV: Floats, largest_S1: Floats) -> Ints:
    """Return bins of the distance from the row's largest logit, 32 per octave."""
    bits_SV = (largest_S1 - x_SV).astype(np.float32).view(np.int32)
    return np.clip((bits_SV >> BIN_SHIFT) - FIRST_BIN, 0, NUM_BINS - 1).astype(np.int64)


def part_of(top_p_S: Floats, mass_S: Ints) -> Ints:
    """Return the least whole mass that is at least top-p of `mass_S`."""
    return np.ceil(top_p_S.astype(np.float64) * mass_S.astype(np.float64)).astype(np.int64)


def bins_of_thresholds(
    bin_SV: Ints,
    mass_SV: Ints,
    is_token_SV: Flags,
    top_k_S: Ints,
    top_p_S: Floats,
    has_k_S: Flags,
    has_p_S: Flags,
) -> Bins:
    """Find the bins from the rows' histograms of counts and masses."""
    rows_SV = np.broadcast_to(np.arange(len(bin_SV))[:, None], bin_SV.shape)
    count_SB, mass_SB = np.zeros((2, len(bin_SV), NUM_BINS), dtype=np.int64)
    np.add.at(count_SB, (rows_SV, bin_SV), is_token_SV)
    np.add.at(mass_SB, (rows_SV, bin_SV), np.where(is_token_SV, mass_SV, 0))
    bins_B, mass_S = np.arange(NUM_BINS), mass_SB.sum(1)
    has_k_S = has_k_S & (top_k_S < count_SB.sum(1))
    bin_of_k_S = first(count_SB.cumsum(1) >= top_k_S[:, None])
    before_k_S = (mass_SB * (bins_B < bin_of_k_S[:, None])).sum(1)
    goal_S = part_of(top_p_S, np.where(has_k_S, before_k_S, mass_S))
    bin_of_p_S = first(mass_SB.cumsum(1) >= goal_S[:, None])
    first_S = np.where(has_p_S, bin_of_p_S, bin_of_k_S)
    is_before_SB = bins_B < first_S[:, None]
    return Bins(
        first=first_S,
        last=np.where(has_k_S, bin_of_k_S, bin_of_p_S),
        num_before=(count_SB * is_before_SB).sum(1),
        mass_before=(mass_SB * is_before_SB).sum(1),
        mass=mass_S,
        has_k=has_k_S,
    )


def first(is_match_SE: Flags) -> Ints:
    """Return the lowest matching index; the last index if there is none."""
    return np.where(is_match_SE.any(1), is_match_SE.argmax(1), is_match_SE.shape[1] - 1)


def search(x_SV: Floats, measure_SV: Ints, low_S: Floats, goal_S: Ints) -> Floats:
    """Return the largest logit that reaches the goal with all larger ones; `low` if none does."""
    order_SV = np.argsort(-x_SV, axis=1, kind="stable")
    sums_SV = np.take_along_axis(measure_SV, order_SV, 1).cumsum(1)
    reaches_SV = sums_SV >= goal_S[:, None]
    at_S1 = np.take_along_axis(order_SV, reaches_SV.argmax(1)[:, None], 1)
    found_S = np.take_along_axis(x_SV, at_S1, 1)[:, 0]
    return np.where(reaches_SV.any(1), np.maximum(found_S, low_S), low_S).astype(np.float32)


def last_ties(is_tie_SV: Flags, num_ties_S: Ints) -> Ints:
    """Return the id up to which there are `num_ties_S` ties; V if there are no more ties."""
    num_SV = is_tie_SV.cumsum(1)
    is_cut_S = num_SV[:, -1] > num_ties_S
    return np.where(is_cut_S, (num_SV >= num_ties_S[:, None]).argmax(1), is_tie_SV.shape[1])
