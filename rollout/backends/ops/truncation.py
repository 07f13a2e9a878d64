"""Truncation: the tokens that top-k, then top-p, then min-p keep, by probability at temperature.

Used by `rollout.backends.ops.sampling`, and by `trainer_hooks.doctor.sampling_causes` to recompute
a draw. Top-k and top-p rank tokens by (logit descending, id ascending). So among equal logits the
lowest ids are kept, and top-k keeps exactly k tokens. Shape letters: R rows, V vocabulary, C
leading candidates in rank order.
"""

from __future__ import annotations

import torch
from torch import Tensor

_NUM_CANDIDATES = 1024  # nearly always enough; otherwise whole rows are sorted


def keep_mask(
    logits_RV: Tensor,
    weights_RV: Tensor,
    inverse_temperature_R: Tensor,
    top_k_R: Tensor,
    top_p_R: Tensor,
    min_p_R: Tensor,
) -> Tensor:
    """Return which tokens may be drawn, bool [R, V]. A row's most probable token is always kept.

    `weights_RV` are exp((logit - max) / temperature), so a row's largest weight is 1. `top_k_R`
    keeps the k best tokens. `top_p_R` renormalises their probabilities and keeps the smallest set
    whose mass reaches p, including the token that crosses p. `min_p_R` drops tokens below min_p
    times the largest probability. Each filter is off at 0. Top-k is also off at V and above, and
    top-p at 1 and above. Source of top-p: Holtzman et al. 2020, "The curious case of neural text
    degeneration".
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
        # A row that keeps all candidates, and by top-k may keep more, needs more candidates.
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
