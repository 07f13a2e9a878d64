"""Random batches for the tests of the losses."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Inputs of `policy_loss`; every rollout has at least one trained token."""

    logprobs_BT: torch.Tensor
    behaviour_BT: torch.Tensor
    proximal_BT: torch.Tensor
    reference_BT: torch.Tensor
    advantages_B1: torch.Tensor
    mask_BT: torch.Tensor
    policy_lag_BT: torch.Tensor
    kv_lag_BT: torch.Tensor

    def select(self, rows: torch.Tensor | slice) -> Batch:
        return Batch(**{name: value[rows] for name, value in vars(self).items()})


def random_batch(seed: int, num_rollouts: int = 6, num_positions: int = 9) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    shape = (num_rollouts, num_positions)

    def normal(scale: float, columns: int = num_positions) -> torch.Tensor:
        return scale * torch.randn(num_rollouts, columns, generator=generator)

    behaviour_BT = -normal(1.0).abs() - 0.1
    lengths_B1 = torch.randint(1, num_positions + 1, (num_rollouts, 1), generator=generator)
    return Batch(
        logprobs_BT=behaviour_BT + normal(0.4),
        behaviour_BT=behaviour_BT,
        proximal_BT=behaviour_BT + normal(0.4),
        reference_BT=behaviour_BT + normal(0.4),
        advantages_B1=normal(1.0, 1),
        mask_BT=torch.arange(num_positions) < lengths_B1,
        policy_lag_BT=torch.randint(0, 9, shape, generator=generator),
        kv_lag_BT=4.0 * torch.rand(shape, generator=generator),
    )
