"""From token losses to one number.

Shape letters: B rollouts, T positions.
"""

from __future__ import annotations

import torch

from rollout.errors import ConfigError
from trainer_hooks.losses.config import Aggregation


def aggregate(
    values_BT: torch.Tensor,
    mask_BT: torch.Tensor,
    aggregation: Aggregation = "token-mean",
    denominator: float | None = None,
) -> torch.Tensor:
    """A scalar; `values_BT` must be 0 outside the bool `mask_BT`.

    `token-mean`: sum over tokens / number of tokens (DAPO, Yu et al. 2025, arXiv 2503.14476,
    eq. 8). `seq-mean-token-sum`: sum over tokens / number of rollouts (Dr. GRPO, Liu et al. 2025,
    arXiv 2503.20783, sec. 3.2). `seq-mean-token-mean`: mean over tokens of each rollout, then sum /
    number of rollouts (GRPO, Shao et al. 2024, arXiv 2402.03300, eq. 3). Rollouts without a trained
    token do not count.
    `denominator` takes the place of that last number. With the number of tokens (or rollouts) of
    the whole batch in every micro-batch, their gradients add up to that of the batch.
    Raises ConfigError for a denominator that is not above 0.
    """
    if denominator is not None and not denominator > 0.0:
        raise ConfigError(f"aggregation_denominator={denominator} must be above 0")
    num_tokens_B = mask_BT.sum(dim=1)
    if aggregation == "token-mean":
        total, count = values_BT.sum(), num_tokens_B.sum()
    else:
        per_rollout_B = values_BT.sum(dim=1)
        if aggregation == "seq-mean-token-mean":
            per_rollout_B = per_rollout_B / num_tokens_B.clamp(min=1)
        total, count = per_rollout_B.sum(), (num_tokens_B > 0).sum()
    return total / (count.clamp(min=1) if denominator is None else denominator)
