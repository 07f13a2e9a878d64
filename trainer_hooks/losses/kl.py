"""Estimates of KL(pi || reference) from sampled tokens, for the loss or for the reward.

Used by `trainer_hooks.losses.policy`. `trainer_hooks.train.learner` and users' training loops call
`token_rewards` to penalise KL in the reward. No function has side effects.

Shape letters: B rows, T positions. r = pi / reference at the sampled token.

    k1 = log r                    unbiased, may be negative, high variance
    k2 = (log r)^2 / 2            biased, never negative
    k3 = 1 / r - 1 + log r        unbiased, never negative, lower variance

An estimate that is unbiased as a value can be biased as a loss: the mean of its gradient must equal
the gradient of the KL. The gradients at tokens that pi itself sampled are
    k1: d log pi, whose mean is 0, so it is no penalty at all (refused by PolicyLossConfig);
    k2: log r d log pi, the gradient of KL(pi || reference), unbiased;
    k3: (1 - 1 / r) d log pi, the gradient of KL(reference || pi), another divergence.
With `importance_weighted`, the estimate is multiplied by pi / behaviour. The ratio is
differentiated for k1 and k3, and is a constant for k2. The gradients of all three are then
unbiased, also for tokens of an older policy. In the reward, only k1 has an unbiased gradient.
"Unbiased" is per position, given the tokens before. Only in the reward does a token also answer for
the KL of later positions, through the returns.

Sources: Schulman 2020, Approximating KL divergence; GRPO's k3: Shao et al. 2024, arXiv 2402.03300,
eq. 4; gradients: Tang and Munos 2025, arXiv 2506.09477; the weighted k3: DeepSeek-V3.2, arXiv
2512.02556, sec. 3.1.
"""

from __future__ import annotations

import torch

from trainer_hooks.losses.config import KLEstimator
from trainer_hooks.losses.terms import MAX_LOG_RATIO, MIN_LOGPROB, log_ratios, trained_logprobs


def kl_estimate(
    logprobs: torch.Tensor, reference_logprobs: torch.Tensor, estimator: KLEstimator = "k3"
) -> torch.Tensor:
    """Return an estimate of KL(pi || reference) for each token that pi sampled, with a gradient."""
    difference = reference_logprobs.clamp(min=MIN_LOGPROB) - logprobs.clamp(min=MIN_LOGPROB)
    log_ratio = difference.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    if estimator == "k1":
        return -log_ratio
    if estimator == "k2":
        return log_ratio.square() / 2.0
    return log_ratio.exp() - log_ratio - 1.0


def kl_losses(
    logprobs_BT: torch.Tensor,
    behaviour_logprobs_BT: torch.Tensor,
    reference_logprobs_BT: torch.Tensor,
    mask_BT: torch.Tensor,
    estimator: KLEstimator,
    importance_weighted: bool,
) -> torch.Tensor:
    """Return the KL term of each token [B, T]. The log-probs must be 0 outside the mask."""
    estimate_BT = kl_estimate(logprobs_BT, reference_logprobs_BT, estimator)
    if importance_weighted:
        ratio_BT = log_ratios(logprobs_BT, behaviour_logprobs_BT, mask_BT).exp()
        estimate_BT = estimate_BT * (ratio_BT.detach() if estimator == "k2" else ratio_BT)
    return estimate_BT


def token_rewards(
    rewards_B: torch.Tensor,
    logprobs_BT: torch.Tensor,
    reference_logprobs_BT: torch.Tensor,
    mask_BT: torch.Tensor,
    kl_coefficient: float,
    estimator: KLEstimator = "k1",
) -> torch.Tensor:
    """Return rewards with the KL penalty, float32 [B, T] without a gradient, 0 outside the mask.

    Every trained token gets -kl_coefficient * KL, and the last one also gets the rollout's reward.
    `gae_advantages` takes the result. Group methods take its sums over T. A NaN reward, of a failed
    rollout, stays NaN on the rollout's last trained token, or on token 0 if there is none.
    Source: Ouyang et al. 2022 (InstructGPT), arXiv 2203.02155, eq. 2; per token: Stiennon et al.
    2020, arXiv 2009.01325, sec. 3.4.
    """
    mask_BT = mask_BT.bool()
    kl_BT = kl_estimate(
        trained_logprobs(logprobs_BT.detach(), mask_BT),
        trained_logprobs(reference_logprobs_BT.detach(), mask_BT),
        estimator,
    )
    # argmax returns the first of equal values, which is the last trained token of a flipped mask.
    last_B1 = mask_BT.shape[1] - 1 - mask_BT.flip(1).int().argmax(dim=1, keepdim=True)
    last_B1 = last_B1.masked_fill(~mask_BT.any(dim=1, keepdim=True), 0)
    return (-kl_coefficient * kl_BT).scatter_add(1, last_B1, rewards_B.float()[:, None])
