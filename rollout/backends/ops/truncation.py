"""Truncation: the tokens that top-k, then top-p, then min-p keep, by probability at temperature.

Used by the sampler in torch, and by the trainer's doctor to recompute a draw.

All three rank tokens by (logit descending, id ascending), so ties always keep the lowest ids and
top-k keeps exactly k tokens. Shape letters: R rows, V vocabulary, C leading candidates in rank
order.
"""

from __future__ import annotations

import torch
from torch import Tensor

_NUM_CANDIDATES = (
    1024  # the nucleus of a trained model nearly always fits; otherwise the row is sorted
)


def keep_mask(
    logits_RV: Tensor,
    weights_RV: Tensor,
    inverse_temperature_R: Tensor,
    top_k_R: Tensor,
    top_p_R: Tensor,
    min_p_R: Tensor,
) -> Tensor:
    """Return the tokens that may be drawn, bool [R, V]. A row's most probable token always may.

    `weights` are exp((logit - max) / temperature), so a row's largest is 1. top_k keeps the k best;
    top_p, on what top_k left, renormalised, the smallest set whose mass reaches p, the token that
    crosses p included; min_p drops tokens below min_p times the largest probability. 0 turns each
    off, as do top_k >= V and top_p >= 1. Source of top-p: Holtzman et al. 2020, "The curious case
    of neural text degeneration".
    """
    vocabulary = logits_RV.shape[1]
    k_R = torch.where(top_k_R > 0, top_k_R, vocabulary)
    p_R = torch.where((top_p_R > 0) & (top_p_R < 1), top_p_R.double(), torch.inf)
    keep_RV = weights_RV >= min_p_R.unsqueeze(1)
    if bool(((k_R < vocabulary) | p_R.isfinite()).any()):
        total_R = weights_RV.sum(1, dtype=torch.float64)
        keep_RV &= _keep_ranked(logits_RV, total_R, inverse_temperature_R, k_R, p_R)
    return keep_RV


def _keep_ranked(
    logits_RV: Tensor, total_R: Tensor, inverse_temperature_R: Tensor, k_R: Tensor, p_R: Tensor
) -> Tensor:
    """Return the mask of tokens that top-k and then top-p keep: the first ranks of each row."""
    vocabulary = logits_RV.shape[1]
    num_candidates = min(_NUM_CANDIDATES, vocabulary)
    while True:
        values_RC = logits_RV.topk(num_candidates, dim=1).values
        count_R = _count_kept(values_RC, total_R, inverse_temperature_R, k_R, p_R)
        # A row that kept every candidate although top-k allows more may go on beyond them.
        unfinished = (count_R == num_candidates) & (k_R > num_candidates)
        if num_candidates == vocabulary or not bool(unfinished.any()):
            break
        num_candidates = vocabulary
    threshold_R1 = values_RC.gather(1, count_R.unsqueeze(1) - 1)
    above_RV = logits_RV > threshold_R1
    equal_RV = logits_RV == threshold_R1
    num_equal_R1 = (count_R - above_RV.sum(1)).unsqueeze(1)
    return above_RV | (equal_RV & (equal_RV.cumsum(1) <= num_equal_R1))


def _count_kept(
    values_RC: Tensor, total_R: Tensor, inverse_temperature_R: Tensor, k_R: Tensor, p_R: Tensor
) -> Tensor:
    """Return the number of ranked candidates that are kept, at least one per row."""
    scaled_RC = (values_RC - values_RC[:, :1]) * inverse_temperature_R.unsqueeze(1)
    weights_RC = scaled_RC.exp().double()
    within_k_RC = torch.arange(values_RC.shape[1], device=k_R.device) < k_R.unsqueeze(1)
    cumulative_RC = weights_RC.cumsum(1)
    mass_of_k_R = (weights_RC * within_k_RC).sum(1)
    reaches_k_R = k_R <= values_RC.shape[1]
    mass_R1 = torch.where(reaches_k_R, mass_of_k_R, total_R).unsqueeze(1)
    kept_RC = within_k_RC & (cumulative_RC - weights_RC < p_R.unsqueeze(1) * mass_R1)
    return kept_RC.sum(1).clamp_(min=1)
