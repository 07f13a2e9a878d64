"""Turns the rewards of a group of rollouts into advantages.

Shape letters: P prompts, G rollouts of one prompt (a group).
"""

from __future__ import annotations

import math
from typing import Literal, get_args

import torch

from rollout.errors import ConfigError

AdvantageNormalization = Literal["std", "none"]

# Keeps a group whose rewards differ by rounding only from being blown up to unit size.
STD_EPSILON = 1e-6


def group_advantages(
    rewards_PG: torch.Tensor, normalize: AdvantageNormalization = "std"
) -> torch.Tensor:
    """Rewards relative to their group, float32 [P, G]; the group's mean stands in for a critic.

    A NaN reward marks a failed rollout: it takes no part in the group's mean and deviation, and
    its advantage is 0. A group of equal rewards, or with fewer than two rollouts that did not
    fail, gives zeros. `normalize="std"` divides by the sample standard deviation of the group,
    `"none"` only subtracts the mean.
    Raises ConfigError for another `normalize`, for a shape other than [P, G], for infinite rewards.
    Source: DeepSeekMath (Shao et al. 2024), sec. 4.1; "none": Dr. GRPO (Liu et al. 2025), sec. 3.
    """
    if normalize not in get_args(AdvantageNormalization):
        known = ", ".join(repr(name) for name in get_args(AdvantageNormalization))
        raise ConfigError(f"normalize={normalize!r} is not known; choose one of {known}")
    if rewards_PG.dim() != 2:
        raise ConfigError(
            f"rewards_PG has shape {tuple(rewards_PG.shape)}; one row per prompt is wanted, [P, G]"
        )
    rewards_PG = rewards_PG.to(torch.float32)
    if bool(rewards_PG.isinf().any()):
        raise ConfigError("rewards_PG holds an infinite reward; mark a failed rollout with NaN")

    valid_PG = ~rewards_PG.isnan()
    num_valid_P1 = valid_PG.sum(dim=1, keepdim=True)
    filled_PG = rewards_PG.nan_to_num(nan=0.0)
    mean_P1 = filled_PG.sum(dim=1, keepdim=True) / num_valid_P1.clamp(min=1)
    centred_PG = torch.where(valid_PG, filled_PG - mean_P1, 0.0)
    if normalize == "std":
        variance_P1 = centred_PG.square().sum(dim=1, keepdim=True) / (num_valid_P1 - 1).clamp(min=1)
        centred_PG = centred_PG / (variance_P1.sqrt() + STD_EPSILON)
    return torch.where(has_reward_spread(rewards_PG)[:, None], centred_PG, 0.0)


def has_reward_spread(rewards_PG: torch.Tensor) -> torch.Tensor:
    """Which groups hold two different rewards, bool [P]; NaN (a failed rollout) is passed over.

    The others give no gradient and can be left out of the batch: DAPO (Yu et al. 2025), sec. 3.2.
    """
    largest_P = rewards_PG.nan_to_num(nan=-math.inf).amax(dim=1)
    smallest_P = rewards_PG.nan_to_num(nan=math.inf).amin(dim=1)
    return largest_P > smallest_P
