"""Token weights for rollouts of older policies, set by an `OffPolicyCorrection`.

Used by `trainer_hooks.losses.policy` and by users' training loops. No function has side effects.

Shape letters: B rows, T positions. w = exp(proximal - behaviour), of log-probs.

Sources. Truncated importance sampling: Espeholt et al. 2018 (IMPALA), arXiv 1802.01561, sec. 4.1;
for the gap between trainer and engine: Yao et al. 2025, Your efficient RL framework secretly brings
you off-policy RL training. Masked: IcePop, in Ling team 2025, arXiv 2510.18855. Geometric mean per
rollout: Zheng et al. 2025 (GSPO), arXiv 2507.18071, eq. 7.

Why the band [low, high] narrows with lag: policy lag + KV lag is the number of updates between the
version of the KV that a token attended to and the trainer's version. Every update adds a step to
log w. The variance of log w thus grows about linearly with that number, and the variance of w
exponentially. Dividing the band's logarithmic width by 1 + `lag_decay` * lag bounds the variance
that an old token can add. The price is a bias of old tokens.
"""

from __future__ import annotations

from typing import Any

import torch

from rollout.errors import ConfigError
from trainer_hooks.losses.config import OffPolicyCorrection
from trainer_hooks.losses.terms import rollout_log_ratios


def correction_weights(
    log_ratio_BT: torch.Tensor,
    mask_BT: torch.Tensor,
    correction: OffPolicyCorrection,
    policy_lag_BT: torch.Tensor | None = None,
    kv_lag_BT: torch.Tensor | None = None,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return the weight of each token, [B, T] without a gradient, and flags by name, bool [B, T].

    `log_ratio_BT` is proximal - behaviour, and 0 outside the mask. The flags `above` and `below`
    mark tokens whose ratio is outside the band. The flag `dropped` marks tokens whose weight is set
    to 0. With the levels sequence and geometric, a rollout's tokens share one w.
    Raises ConfigError if the correction needs a lag that is not given.
    """
    log_ratio_BT = log_ratio_BT.detach()
    log_weight_BT = rollout_log_ratios(log_ratio_BT, mask_BT, correction.level)
    weight_BT = log_weight_BT.exp().expand_as(log_ratio_BT)
    low, high = _bounds(correction, policy_lag_BT, kv_lag_BT)
    above_BT, below_BT = weight_BT > high, weight_BT < low
    dropped_BT = torch.zeros_like(above_BT)
    if correction.mode == "mask":
        dropped_BT = above_BT | below_BT
    elif correction.mode == "truncate":
        weight_BT = weight_BT.clamp(low, high)
    else:
        weight_BT = torch.ones_like(weight_BT)
    if correction.max_kv_lag is not None:
        if kv_lag_BT is None:
            raise ConfigError(f"max_kv_lag={correction.max_kv_lag} needs kv_lag_BT")
        dropped_BT = dropped_BT | (kv_lag_BT > correction.max_kv_lag)
    flags = {"above": above_BT, "below": below_BT, "dropped": dropped_BT}
    return weight_BT.masked_fill(dropped_BT, 0.0), {
        name: flag_BT & mask_BT for name, flag_BT in flags.items()
    }


def sequence_mask(
    log_ratio_BT: torch.Tensor, advantages_BT: torch.Tensor, mask_BT: torch.Tensor, max_kl: float
) -> torch.Tensor:
    """Return which tokens have A < 0 in a rollout that is unlikely under the policy, bool [B, T].

    `log_ratio_BT` is log pi - log behaviour, and 0 outside the mask. A rollout is unlikely if its
    mean of log behaviour - log pi is above `max_kl`. Making its tokens still less likely
    destabilises updates on old rollouts.
    Source: DeepSeek-V3.2, arXiv 2512.02556, sec. 3.1, "off-policy sequence masking".
    """
    mean_B1 = -rollout_log_ratios(log_ratio_BT, mask_BT, "geometric")
    return (advantages_BT < 0.0) & (mean_B1 > max_kl) & mask_BT


def _bounds(
    correction: OffPolicyCorrection,
    policy_lag_BT: torch.Tensor | None,
    kv_lag_BT: torch.Tensor | None,
) -> tuple[Any, Any]:
    low, high = correction.bounds
    if correction.lag_decay == 0.0:
        return low, high
    if policy_lag_BT is None or kv_lag_BT is None:
        missing = "policy_lag_BT" if policy_lag_BT is None else "kv_lag_BT"
        raise ConfigError(
            f"lag_decay={correction.lag_decay} needs policy_lag_BT and kv_lag_BT; {missing} is "
            "missing (zeros say that there is no lag)"
        )
    lag_BT = (policy_lag_BT + kv_lag_BT).float().nan_to_num(nan=0.0).clamp(min=0.0)
    power_BT = 1.0 / (1.0 + correction.lag_decay * lag_BT)
    return low**power_BT, high**power_BT
