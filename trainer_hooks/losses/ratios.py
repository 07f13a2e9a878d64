"""Probability ratios of tokens and of whole rollouts.

Shape letters: B rollouts, T positions.
"""

from __future__ import annotations

import torch

from trainer_hooks.losses.config import RatioLevel

# exp(20) is half a billion: no clip or cap lets such a ratio through, and float32 still holds its
# square, so sums stay finite.
MAX_LOG_RATIO = 20.0


def trained_values(values_BT: torch.Tensor, mask_BT: torch.Tensor) -> torch.Tensor:
    """`values_BT` in float32 with 0 outside the mask, where anything may stand, NaN included."""
    return values_BT.float().masked_fill(~mask_BT, 0.0)


def log_ratios(
    numerator_BT: torch.Tensor, denominator_BT: torch.Tensor, mask_BT: torch.Tensor
) -> torch.Tensor:
    """Difference of log-probs, 0 outside the mask, held within +-MAX_LOG_RATIO."""
    difference_BT = (numerator_BT - denominator_BT).masked_fill(~mask_BT, 0.0)
    return difference_BT.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def rollout_log_ratios(
    log_ratio_BT: torch.Tensor, mask_BT: torch.Tensor, level: RatioLevel
) -> torch.Tensor:
    """[B, 1] for a level of whole rollouts, [B, T] for `token`.

    `sequence` is the log of the product over the trained tokens, `geometric` that of their mean
    (GSPO, Zheng et al. 2025, arXiv 2507.18071, eq. 7).
    """
    if level == "token":
        return log_ratio_BT
    total_B1 = log_ratio_BT.sum(dim=1, keepdim=True)
    if level == "geometric":
        total_B1 = total_B1 / mask_BT.sum(dim=1, keepdim=True).clamp(min=1)
    return total_B1.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def differentiable_ratios(
    logprobs_BT: torch.Tensor,
    anchor_logprobs_BT: torch.Tensor,
    mask_BT: torch.Tensor,
    level: RatioLevel,
) -> torch.Tensor:
    """pi / anchor per token [B, T], with its gradient to `logprobs_BT`.

    For a level of whole rollouts every token has its rollout's ratio, and the ratio's gradient is
    credited to the rollout's own tokens, one by one: s * exp(c (log pi - sg(log pi))), where sg
    stops the gradient and c makes the mean over tokens have the gradient of s. So advantages may
    differ within a rollout. Source: GSPO-token, Zheng et al. 2025, eq. 14.
    """
    if level == "token":
        return log_ratios(logprobs_BT, anchor_logprobs_BT, mask_BT).exp()
    log_ratio_BT = log_ratios(logprobs_BT.detach(), anchor_logprobs_BT, mask_BT)
    ratio_B1 = rollout_log_ratios(log_ratio_BT, mask_BT, level).exp()
    scale_B1 = mask_BT.sum(dim=1, keepdim=True) if level == "sequence" else 1.0
    return ratio_B1 * (scale_B1 * (logprobs_BT - logprobs_BT.detach())).exp()
