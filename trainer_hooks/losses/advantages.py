"""Advantages from rewards: relative to a group of rollouts, or by a critic's values.

Used by users' training loops, `trainer_hooks.train.learner`, `trainer_hooks.train.critic`,
`trainer_hooks.train.no_signal`, `trainer_hooks.producer.groups` and
`trainer_hooks.rewards.ready_made`. No function has side effects.

Shape letters: P prompts, G rollouts of one prompt (a group), B rollouts, T positions.
"""

from __future__ import annotations

import math
from typing import get_args

import torch

from rollout.errors import ConfigError
from trainer_hooks.losses.config import AdvantageBaseline, AdvantageNormalization

# Added to a deviation, as in verl, so that nearly equal rewards do not get advantages of size 1.
STD_EPSILON = 1e-6
# Numbers that differ by at most this many units in the last place count as equal: sums of the same
# few terms in another order differ by as much.
ROUNDING_UNITS = 4


def group_advantages(
    rewards_PG: torch.Tensor,
    normalize: AdvantageNormalization = "std",
    baseline: AdvantageBaseline = "mean",
) -> torch.Tensor:
    """Return rewards relative to their group, float32 [P, G].

    A NaN reward marks a failed rollout. The failed rollout is left out of the group's mean and
    deviation, and its advantage is 0. All advantages of a group are 0 if it has no spread
    (`has_reward_spread`) or fewer than two valid rollouts.
    `normalize`: "std" divides by the sample standard deviation of the group. "none" only subtracts
    the baseline.
    `baseline`: "mean" of the group, or "leave_one_out", the mean of the other rollouts. The latter
    does not depend on the rollout's own reward, so it adds no bias.
    Raises ConfigError for another `normalize` or `baseline`, a shape other than [P, G], and
    infinite rewards.
    Source: DeepSeekMath (Shao et al. 2024), arXiv 2402.03300, sec. 4.1; "none": Dr. GRPO (Liu et
    al. 2025), arXiv 2503.20783, sec. 3.2; "leave_one_out": RLOO (Ahmadian et al. 2024), arXiv
    2402.14740.
    """
    _check_choice("normalize", normalize, AdvantageNormalization)
    _check_choice("baseline", baseline, AdvantageBaseline)
    if rewards_PG.dim() != 2:
        raise ConfigError(
            f"rewards_PG has shape {tuple(rewards_PG.shape)}; give one row per prompt, [P, G]"
        )
    if bool(rewards_PG.isinf().any()):
        raise ConfigError("rewards_PG holds an infinite reward; mark a failed rollout with NaN")
    has_spread_P1 = has_reward_spread(rewards_PG)[:, None]

    # Squares of large float32 rewards overflow in float32, and their mean is off by its rounding.
    rewards_PG = rewards_PG.to(torch.float64)
    valid_PG = ~rewards_PG.isnan()
    num_valid_P1 = valid_PG.sum(dim=1, keepdim=True)
    filled_PG = rewards_PG.nan_to_num(nan=0.0)
    mean_P1 = filled_PG.sum(dim=1, keepdim=True) / num_valid_P1.clamp(min=1)
    centred_PG = torch.where(valid_PG, filled_PG - mean_P1, 0.0)
    if normalize == "std":
        variance_P1 = centred_PG.square().sum(dim=1, keepdim=True) / (num_valid_P1 - 1).clamp(min=1)
        centred_PG = centred_PG / (variance_P1.sqrt() + STD_EPSILON)
    if baseline == "leave_one_out":
        # r - mean of the others = (r - mean of all) n / (n - 1)
        centred_PG = centred_PG * num_valid_P1 / (num_valid_P1 - 1).clamp(min=1)
    return torch.where(has_spread_P1, centred_PG, 0.0).to(torch.float32)


def has_reward_spread(rewards_PG: torch.Tensor) -> torch.Tensor:
    """Return which groups have at least two different rewards, bool [P].

    NaN (a failed rollout) is ignored. Rewards that differ only by the rounding of their dtype are
    equal. Groups without spread give no gradient and can be left out of the batch: DAPO (Yu et al.
    2025), sec. 3.2.
    """
    if not rewards_PG.is_floating_point():
        rewards_PG = rewards_PG.to(torch.float64)
    is_failed_PG = rewards_PG.isnan()
    largest_P = rewards_PG.masked_fill(is_failed_PG, -math.inf).amax(dim=1)
    smallest_P = rewards_PG.masked_fill(is_failed_PG, math.inf).amin(dim=1)
    return _is_beyond_rounding(smallest_P, largest_P)


def whitened(values_BT: torch.Tensor, mask_BT: torch.Tensor) -> torch.Tensor:
    """Return the values in the mask, shifted and scaled to mean 0 and deviation 1, float32 [B, T].

    Values outside the mask become 0. All become 0 if fewer than two values are in the mask, or if
    they are equal up to rounding.
    """
    trained_N = values_BT[mask_BT]
    if len(trained_N) < 2 or not bool(_is_beyond_rounding(trained_N.amin(), trained_N.amax())):
        return torch.zeros_like(values_BT, dtype=torch.float32)
    trained_N = trained_N.double()
    whitened_BT = (values_BT.double() - trained_N.mean()) * torch.rsqrt(trained_N.var() + 1e-8)
    return whitened_BT.masked_fill(~mask_BT, 0.0).float()


def _is_beyond_rounding(smallest: torch.Tensor, largest: torch.Tensor) -> torch.Tensor:
    unit = torch.finfo(largest.dtype).eps
    size = torch.maximum(smallest.double().abs(), largest.double().abs())
    return largest.double() - smallest.double() > ROUNDING_UNITS * unit * size


def gae_advantages(
    rewards_BT: torch.Tensor,
    values_BT: torch.Tensor,
    mask_BT: torch.Tensor,
    *,
    gamma: float = 1.0,
    lam: float = 0.95,
    bootstrap_values_B: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return generalised advantage estimates and returns (advantage + value), float32 [B, T].

    Only trained tokens are time steps. Prompts, padding and tool output between trained tokens take
    no time. The value after a rollout's last trained token is 0, or `bootstrap_values_B` for a
    truncated rollout. Values outside the mask are not read, and the results there are 0. A rollout
    with a NaN reward gets zeros.
    Raises ConfigError for shapes that differ and for gamma or lam outside [0, 1].
    Source: Schulman et al. 2016, arXiv 1506.02438, eq. 16.
    """
    shapes = [tuple(x.shape) for x in (rewards_BT, values_BT, mask_BT)]
    if len(set(shapes)) != 1 or len(shapes[0]) != 2:
        raise ConfigError(f"rewards, values and mask must be of one shape [B, T]; got {shapes}")
    for name, value in (("gamma", gamma), ("lam", lam)):
        if not 0.0 <= value <= 1.0:
            raise ConfigError(f"{name}={value} must be in [0, 1]")
    mask_BT = mask_BT.bool()
    rewards_BT = rewards_BT.detach().float().masked_fill(~mask_BT, 0.0)
    mask_BT = mask_BT & ~rewards_BT.isnan().any(dim=1, keepdim=True)
    rewards_BT = rewards_BT.masked_fill(~mask_BT, 0.0)
    values_BT = values_BT.detach().float().masked_fill(~mask_BT, 0.0)
    errors_BT = rewards_BT + gamma * _next_values(values_BT, mask_BT, bootstrap_values_B)
    errors_BT = (errors_BT - values_BT).masked_fill(~mask_BT, 0.0)
    decay_BT = torch.where(mask_BT, gamma * lam, 1.0)
    advantages_BT = _discounted_sums(errors_BT, decay_BT).masked_fill(~mask_BT, 0.0)
    return advantages_BT, advantages_BT + values_BT


def reinforce_plus_plus_advantages(
    rewards_BT: torch.Tensor, mask_BT: torch.Tensor, gamma: float = 1.0
) -> torch.Tensor:
    """Return each token's sum of rewards from the token on, whitened, float32 [B, T].

    The sum is discounted by `gamma`, and whitened over the trained tokens.
    `rewards_BT`: result of `token_rewards`, which has the reward on a rollout's last token and the
    KL penalties. For the variant with a baseline, first subtract the group's mean from the rewards
    by `group_advantages(..., normalize="none")`.
    A rollout with a NaN reward gets zeros and does not count. Rewards outside the mask are not
    read, and the results there are 0.
    Raises ConfigError for shapes that differ and a gamma outside [0, 1].
    Source: REINFORCE++ (Hu et al. 2025), arXiv 2501.03262, sec. 3; whitened as in verl.
    """
    if rewards_BT.shape != mask_BT.shape or rewards_BT.dim() != 2:
        shapes = [tuple(rewards_BT.shape), tuple(mask_BT.shape)]
        raise ConfigError(f"rewards and mask must be of one shape [B, T]; got {shapes}")
    if not 0.0 <= gamma <= 1.0:
        raise ConfigError(f"gamma={gamma} must be in [0, 1]")
    mask_BT = mask_BT.bool()
    rewards_BT = rewards_BT.detach().float().masked_fill(~mask_BT, 0.0)
    mask_BT = mask_BT & ~rewards_BT.isnan().any(dim=1, keepdim=True)
    rewards_BT = rewards_BT.masked_fill(~mask_BT, 0.0)
    returns_BT = _discounted_sums(rewards_BT, torch.where(mask_BT, gamma, 1.0))
    return whitened(returns_BT, mask_BT)


def overlong_penalties(
    completion_lengths_B: torch.Tensor, max_length: int, cache_length: int
) -> torch.Tensor:
    """Return penalties to add to the rewards of long completions, float32 [B] in [-1, 0].

    The penalty is 0 up to `max_length` - `cache_length` tokens, then falls linearly to -1 at
    `max_length`.
    `completion_lengths_B`: numbers of generated tokens, without tool output, as in a RolloutBatch.
    Raises ConfigError unless 0 < cache_length <= max_length.
    Source: DAPO, "soft overlong punishment" (Yu et al. 2025), arXiv 2503.14476, eq. 13.
    """
    if not 0 < cache_length <= max_length:
        raise ConfigError(f"{cache_length=} must be above 0 and at most {max_length=}")
    excess_B = completion_lengths_B.float() - (max_length - cache_length)
    return -(excess_B / cache_length).clamp(0.0, 1.0)


def _next_values(
    values_BT: torch.Tensor, mask_BT: torch.Tensor, bootstrap_values_B: torch.Tensor | None
) -> torch.Tensor:
    """Return at each position the value of the next trained token.

    After the last trained token it is the bootstrap value, or 0 if none is given.
    """
    num_rollouts, num_positions = mask_BT.shape
    end_B = values_BT.new_zeros(num_rollouts)
    if bootstrap_values_B is not None:
        end_B = bootstrap_values_B.detach().to(values_BT)
    positions_T = torch.arange(num_positions, device=mask_BT.device)
    # The nearest trained position at or after each position, or num_positions (the bootstrap's).
    own_BT = torch.where(mask_BT, positions_T, num_positions)
    nearest_BT = own_BT.flip(1).cummin(dim=1).values.flip(1)
    next_BT = torch.nn.functional.pad(nearest_BT, (0, 1), value=num_positions)[:, 1:]
    return torch.cat([values_BT, end_B[:, None]], dim=1).gather(1, next_BT)


def _discounted_sums(values_BT: torch.Tensor, decay_BT: torch.Tensor) -> torch.Tensor:
    """Return s, where s[t] = values[t] + decay[t] * s[t + 1]."""
    # log2(T) passes: Blelloch 1990, Prefix sums and their applications, sec. 1.4.
    shift = 1
    while shift < values_BT.shape[1]:
        later_BT = torch.nn.functional.pad(values_BT, (0, shift))[:, shift:]
        values_BT = values_BT + decay_BT * later_BT
        decay_BT = decay_BT * torch.nn.functional.pad(decay_BT, (0, shift))[:, shift:]
        shift *= 2
    return values_BT


def _check_choice(name: str, value: str, choices: object) -> None:
    known = get_args(choices)
    if value not in known:
        listed = ", ".join(repr(choice) for choice in known)
        raise ConfigError(f"{name}={value!r} is not known; choose one of {listed}")
