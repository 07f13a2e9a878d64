"""Terms of the losses: probability ratios, the loss of each token by kind, and their aggregate.

Used by the modules `policy`, `corrections`, `diagnostics` and `kl` of `trainer_hooks.losses`, and
by `trainer_hooks.update.micro_batches`. No function has side effects.

Shape letters: B rows, T positions.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rollout.errors import ConfigError
from trainer_hooks.losses.config import KINDS, Aggregation, PolicyLossConfig, RatioLevel

# exp(20) is half a billion. Any clip or cap is far below it, and its square fits into float32, so
# sums stay finite.
MAX_LOG_RATIO = 20.0
# Lower log-probs, also -inf, are clamped to this value and have no gradient, so that no difference
# of log-probs is NaN and sums are finite. No engine samples such a token: e^-1000 is 0 in float64.
MIN_LOGPROB = -1000.0


def trained_values(values_BT: torch.Tensor, mask_BT: torch.Tensor) -> torch.Tensor:
    """Return `values_BT` in float32, with 0 outside the mask, where the input may be NaN."""
    return values_BT.float().masked_fill(~mask_BT, 0.0)


def trained_logprobs(logprobs_BT: torch.Tensor, mask_BT: torch.Tensor) -> torch.Tensor:
    """Return `trained_values` of log-probs, clamped at MIN_LOGPROB."""
    return trained_values(logprobs_BT, mask_BT).clamp(min=MIN_LOGPROB)


def log_ratios(
    numerator_BT: torch.Tensor, denominator_BT: torch.Tensor, mask_BT: torch.Tensor
) -> torch.Tensor:
    """Return the difference of log-probs, clamped to +-MAX_LOG_RATIO, and 0 outside the mask."""
    difference_BT = (numerator_BT - denominator_BT).masked_fill(~mask_BT, 0.0)
    return difference_BT.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def rollout_log_ratios(
    log_ratio_BT: torch.Tensor, mask_BT: torch.Tensor, level: RatioLevel
) -> torch.Tensor:
    """Return log ratios, [B, T] for the level `token` and [B, 1] for the levels of whole rollouts.

    `sequence` is the log of the product over the trained tokens. `geometric` is the log of their
    geometric mean (GSPO, Zheng et al. 2025, arXiv 2507.18071, eq. 7).
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
    """Return pi / anchor per token [B, T], with a gradient to `logprobs_BT`.

    With a level of whole rollouts, every token has its rollout's ratio s and a share of the
    gradient of s, so advantages may differ within a rollout. The formula is s * exp(c (log pi -
    sg(log pi))), where sg stops the gradient. The factor c makes the mean over tokens have the
    gradient of s. Source: GSPO-token, Zheng et al. 2025, eq. 14.
    """
    if level == "token":
        return log_ratios(logprobs_BT, anchor_logprobs_BT, mask_BT).exp()
    log_ratio_BT = log_ratios(logprobs_BT.detach(), anchor_logprobs_BT, mask_BT)
    ratio_B1 = rollout_log_ratios(log_ratio_BT, mask_BT, level).exp()
    scale_B1 = mask_BT.sum(dim=1, keepdim=True) if level == "sequence" else 1.0
    return ratio_B1 * (scale_B1 * (logprobs_BT - logprobs_BT.detach())).exp()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenLosses:
    """Losses of tokens, and where the ratio was clipped, [B, T]. Only `losses_BT` has a gradient.

    `is_low_BT`: True where the ratio is below the clip range and A < 0.
    `is_high_BT`: True where the ratio is above the clip range and A > 0.
    `is_dual_BT`: True where the dual clip acts, or None without a dual clip.
    Values outside the mask have no meaning.
    """

    losses_BT: torch.Tensor
    ratio_BT: torch.Tensor
    is_low_BT: torch.Tensor
    is_high_BT: torch.Tensor
    is_dual_BT: torch.Tensor | None

    @property
    def is_clipped_BT(self) -> torch.Tensor:
        return self.is_low_BT | self.is_high_BT


def token_losses(
    logprobs_BT: torch.Tensor,
    anchor_logprobs_BT: torch.Tensor,
    advantages_BT: torch.Tensor,
    mask_BT: torch.Tensor,
    config: PolicyLossConfig,
) -> TokenLosses:
    """Return the token losses, with r = pi / anchor at the kind's level and its clip range.

    Most kinds: -min(r A, clip(r) A). With `dual_clip` c and A < 0, at most -c A.
    cispo: -sg(clip(r)) A log pi. Every token keeps a gradient, and the clip only bounds its weight.
    sapo: -4 / t sigmoid(t (r - 1)) A, with temperature t by the sign of A. The sigmoid's slope is 1
    at r = 1 and falls with the distance from 1.
    """
    kind = KINDS[config.kind]
    epsilon_low, epsilon_high = config.clip_range
    ratio_BT = differentiable_ratios(logprobs_BT, anchor_logprobs_BT, mask_BT, kind.ratio_level)
    clipped_BT = ratio_BT.clamp(1.0 - epsilon_low, 1.0 + epsilon_high)
    fixed_BT, is_dual_BT = ratio_BT.detach(), None
    if kind.clips_weight:
        losses_BT = -(clipped_BT.detach() * advantages_BT * logprobs_BT)
    elif kind.gate_temperatures is not None:
        above, below = kind.gate_temperatures
        temperature_BT = torch.where(advantages_BT > 0.0, above, below)
        gate_BT = 4.0 / temperature_BT * torch.sigmoid(temperature_BT * (ratio_BT - 1.0))
        losses_BT = -(gate_BT * advantages_BT)
    else:
        gain_BT = torch.minimum(ratio_BT * advantages_BT, clipped_BT * advantages_BT)
        if config.dual_clip is not None:
            is_dual_BT = (fixed_BT > config.dual_clip) & (advantages_BT < 0.0)
            gain_BT = torch.where(is_dual_BT, config.dual_clip * advantages_BT, gain_BT)
        losses_BT = -gain_BT
    return TokenLosses(
        losses_BT=losses_BT,
        ratio_BT=fixed_BT,
        is_low_BT=(fixed_BT < 1.0 - epsilon_low) & (advantages_BT < 0.0),
        is_high_BT=(fixed_BT > 1.0 + epsilon_high) & (advantages_BT > 0.0),
        is_dual_BT=is_dual_BT,
    )


def aggregate(
    values_BT: torch.Tensor,
    mask_BT: torch.Tensor,
    aggregation: Aggregation = "token-mean",
    denominator: float | torch.Tensor | None = None,
    rollout_tokens_B: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the scalar aggregate of `values_BT`, which must be 0 outside the bool `mask_BT`.

    `token-mean`: sum over tokens / number of tokens (DAPO, Yu et al. 2025, arXiv 2503.14476, eq.
    8).
    `seq-mean-token-sum`: sum over tokens / number of rollouts (Dr. GRPO, Liu et al. 2025, arXiv
    2503.20783, sec. 3.2).
    `seq-mean-token-mean`: mean over tokens of each rollout, then sum / number of rollouts (GRPO,
    Shao et al. 2024, arXiv 2402.03300, eq. 3).
    Rollouts without a trained token do not count.
    `denominator`: divisor in place of the number of tokens or rollouts. If every micro-batch gets
    the whole batch's number, their gradients add up to the gradient of the batch.
    `rollout_tokens_B`: number of trained tokens in all rows of each row's rollout, also in other
    micro-batches. With it, a rollout of several rows counts once.
    Raises ConfigError for a denominator that is not above 0.
    """
    if denominator is not None and not denominator > 0.0:
        raise ConfigError(f"aggregation_denominator={denominator} must be above 0")
    if denominator is None:
        denominator = aggregation_denominator(mask_BT, aggregation, rollout_tokens_B)
    if aggregation == "token-mean":
        return values_BT.sum() / denominator
    per_rollout_B = values_BT.sum(dim=1)
    if aggregation == "seq-mean-token-mean":
        num_tokens_B = mask_BT.sum(dim=1) if rollout_tokens_B is None else rollout_tokens_B
        per_rollout_B = per_rollout_B / num_tokens_B.clamp(min=1)
    return per_rollout_B.sum() / denominator


def aggregation_denominator(
    mask_BT: torch.Tensor,
    aggregation: Aggregation,
    rollout_tokens_B: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the divisor of `aggregate`: the number of trained tokens, or of rollouts with one.

    The divisor is at least 1. Give a whole batch's divisor to the losses of all its micro-batches.
    """
    if aggregation == "token-mean":
        return mask_BT.sum().clamp(min=1)
    if rollout_tokens_B is None:
        return mask_BT.any(dim=1).sum().clamp(min=1)
    # Each row is a share of its rollout. The shares of a rollout add up to 1.
    shares_B = mask_BT.sum(dim=1) / rollout_tokens_B.clamp(min=1).double()
    return shares_B.sum().round().long().clamp(min=1)
