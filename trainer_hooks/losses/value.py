"""The critic's loss.

Shape letters: B rollouts, T positions.
"""

from __future__ import annotations

import torch

from rollout.errors import ConfigError
from trainer_hooks.losses.aggregation import aggregate
from trainer_hooks.losses.config import Aggregation
from trainer_hooks.losses.diagnostics import masked_mean, to_floats
from trainer_hooks.losses.ratios import trained_values


def value_loss(
    values_BT: torch.Tensor,
    old_values_BT: torch.Tensor,
    returns_BT: torch.Tensor,
    mask_BT: torch.Tensor,
    *,
    clip_range: float | None = 0.2,
    aggregation: Aggregation = "token-mean",
    aggregation_denominator: float | None = None,
) -> tuple[torch.Tensor, dict[str, float]]:
    """Half the squared error to the returns, a scalar with a gradient to `values_BT`, and metrics.

    Per token max((V - R)^2, (clip(V) - R)^2) / 2, where clip holds V within `clip_range` of the
    value at the start of the update: a step away from it earns nothing. None leaves the clip out.
    Metrics in verl's names: vf_loss, vf_clipfrac, vpred_mean. Values outside the mask are never
    looked at. Raises ConfigError for shapes that differ and a clip range that is not above 0.
    Source: Schulman et al. 2016, arXiv 1506.02438; the clip: Engstrom et al. 2020, arXiv
    2005.12729, sec. 3.
    """
    shapes = [tuple(x.shape) for x in (values_BT, old_values_BT, returns_BT, mask_BT)]
    if len(set(shapes)) != 1 or len(shapes[0]) != 2:
        raise ConfigError(f"values, returns and mask must be of one shape [B, T]; got {shapes}")
    if clip_range is not None and not clip_range > 0.0:
        raise ConfigError(f"clip_range={clip_range} must be above 0, or None for no clip")
    mask_BT = mask_BT.bool()
    values_BT = trained_values(values_BT, mask_BT)
    old_values_BT = trained_values(old_values_BT.detach(), mask_BT)
    returns_BT = trained_values(returns_BT.detach(), mask_BT)
    squares_BT = (values_BT - returns_BT).square()
    is_clipped_BT = torch.zeros_like(mask_BT)
    if clip_range is not None:
        change_BT = (values_BT - old_values_BT).clamp(-clip_range, clip_range)
        clipped_BT = (old_values_BT + change_BT - returns_BT).square()
        is_clipped_BT = clipped_BT.detach() > squares_BT.detach()
        squares_BT = torch.maximum(squares_BT, clipped_BT)
    loss = aggregate(squares_BT / 2.0, mask_BT, aggregation, aggregation_denominator)
    metrics = {
        "vf_loss": loss.detach(),
        "vf_clipfrac": masked_mean(is_clipped_BT, mask_BT),
        "vpred_mean": masked_mean(values_BT.detach(), mask_BT),
    }
    return loss, to_floats(metrics, None)
