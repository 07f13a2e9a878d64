"""The loss of each token, by kind, before old tokens are weighed and all are aggregated.

Shape letters: B rollouts, T positions.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from trainer_hooks.losses.config import KINDS, PolicyLossConfig
from trainer_hooks.losses.ratios import differentiable_ratios


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenLosses:
    """Losses [B, T] with a gradient; the ratio and what happened to it, without one.

    `is_low_BT`, `is_high_BT`: the clip acts, below for A < 0 or above for A > 0.
    `is_dual_BT`: the dual clip acts. Values outside the mask have no meaning.
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
    """The losses with r = pi / anchor of the kind's level and epsilon its clip range.

    All kinds but cispo: -min(r A, clip(r) A). With `dual_clip` c and A < 0, at most -c A.
    cispo: -sg(clip(r)) A log pi; every token keeps a gradient, the clip only bounds its weight.
    """
    kind = KINDS[config.kind]
    epsilon_low, epsilon_high = config.clip_range
    ratio_BT = differentiable_ratios(logprobs_BT, anchor_logprobs_BT, mask_BT, kind.ratio_level)
    clipped_BT = ratio_BT.clamp(1.0 - epsilon_low, 1.0 + epsilon_high)
    fixed_BT, is_dual_BT = ratio_BT.detach(), None
    if kind.clips_weight:
        losses_BT = -(clipped_BT.detach() * advantages_BT * logprobs_BT)
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
