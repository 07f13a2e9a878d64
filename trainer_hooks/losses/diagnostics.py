"""Metrics of a loss on its batch: ratios, effective sample size, divergence and clipping.

Used by `trainer_hooks.losses.policy`. Users call `effective_sample_size`. No function has side
effects. Metrics stay tensors until `to_floats` copies them to the host. A metric named as in TRL
(`kl`, `entropy`, `clip_ratio/*`, `cispo_clip_ratio`, `sampling/importance_sampling_ratio/*`) or
verl (`ppo_kl`, `pg_clipfrac_lower`, `rollout_corr/*`) has the same meaning there.

Shape letters: B rows, T positions, N tokens (B * T), C cells of the lag table, S sums.
"""

from __future__ import annotations

import torch

from trainer_hooks.losses.config import KINDS, PolicyLossConfig
from trainer_hooks.losses.terms import TokenLosses, log_ratios

# Upper bounds of the cells of lags, in versions. The last cell is unbounded.
POLICY_LAG_EDGES = (0.0, 1.0, 3.0)
POLICY_LAG_NAMES = ("0", "1", "2-3", "4-up")
KV_LAG_EDGES = (0.0, 1.0)
KV_LAG_NAMES = ("0", "0-1", "1-up")
CELL_METRICS = (
    "token_fraction",
    "ratio_mean",
    "weight_mean",
    "eff_sample_size",
    "approx_kl",
    "clip_fraction",
    "masked_fraction",
)

Metrics = dict[str, torch.Tensor]


def effective_sample_size(weights_BT: torch.Tensor, mask_BT: torch.Tensor) -> torch.Tensor:
    """Return (sum w)^2 / (n sum w^2) over the mask. Equal weights give 1, unequal weights less.

    Returns 0 for an empty mask.
    Source: Kong 1992, A note on importance sampling using standardized weights.
    """
    weights_BT = weights_BT.masked_fill(~mask_BT, 0.0)
    squares = mask_BT.sum() * weights_BT.square().sum()
    return torch.where(squares > 0.0, weights_BT.sum().square() / squares.clamp(min=1e-30), 0.0)


def loss_metrics(
    terms: TokenLosses,
    logprobs_BT: torch.Tensor,
    anchor_logprobs_BT: torch.Tensor,
    log_ratio_BT: torch.Tensor,
    mask_BT: torch.Tensor,
    config: PolicyLossConfig,
    entropies_BT: torch.Tensor | None = None,
) -> Metrics:
    """Return the metrics of a batch. `log_ratio_BT` is log pi - log behaviour.

    `ppo_kl` (estimator k1) is the divergence from the anchor, the policy around which the ratio is
    clipped. `approx_kl` (k3) is the divergence from the behaviour policy. `weight_mean` and
    `eff_sample_size` describe the token weights pi / behaviour. `sampled_entropy`, the mean of -log
    pi of the sampled tokens, estimates `entropy`, the mean of `entropies_BT`.
    """
    weight_BT = log_ratio_BT.exp()
    step_BT = log_ratios(logprobs_BT, anchor_logprobs_BT, mask_BT)
    metrics = {
        "ratio_mean": masked_mean(terms.ratio_BT, mask_BT),
        **_spread("ratio_", terms.ratio_BT, mask_BT),
        "clip_ratio/low_mean": masked_mean(terms.is_low_BT, mask_BT),
        "clip_ratio/high_mean": masked_mean(terms.is_high_BT, mask_BT),
        "clip_ratio/region_mean": masked_mean(terms.is_clipped_BT, mask_BT),
        "ppo_kl": masked_mean(-step_BT, mask_BT),
        "approx_kl": masked_mean(weight_BT - log_ratio_BT - 1.0, mask_BT),
        "sampled_entropy": masked_mean(-logprobs_BT, mask_BT),
        "weight_mean": masked_mean(weight_BT, mask_BT),
        "eff_sample_size": effective_sample_size(weight_BT, mask_BT),
    }
    if entropies_BT is not None:
        metrics["entropy"] = masked_mean(entropies_BT.detach(), mask_BT)
    if KINDS[config.kind].clips_weight:
        metrics["cispo_clip_ratio"] = metrics["clip_ratio/high_mean"]
    if terms.is_dual_BT is not None:
        metrics["pg_clipfrac_lower"] = masked_mean(terms.is_dual_BT, mask_BT)
    return metrics


def correction_metrics(
    weights_BT: torch.Tensor, flags: Metrics, log_ratio_BT: torch.Tensor, mask_BT: torch.Tensor
) -> Metrics:
    """Return the metrics of an off-policy correction: its weights and the divergence it corrects.

    `flags`: from `correction_weights`.
    `log_ratio_BT`: log anchor - log behaviour.
    """
    prefix = "sampling/importance_sampling_ratio/"
    return {
        f"{prefix}mean": masked_mean(weights_BT, mask_BT),
        **_spread(prefix, weights_BT, mask_BT),
        f"{prefix}fraction_above": masked_mean(flags["above"], mask_BT),
        f"{prefix}fraction_below": masked_mean(flags["below"], mask_BT),
        f"{prefix}eff_sample_size": effective_sample_size(weights_BT, mask_BT),
        "rollout_corr/rollout_rs_masked_fraction": masked_mean(flags["dropped"], mask_BT),
        "rollout_corr/kl": masked_mean(-log_ratio_BT, mask_BT),
        "rollout_corr/k3_kl": masked_mean(log_ratio_BT.exp() - log_ratio_BT - 1.0, mask_BT),
    }


def lag_metrics(
    policy_lag_BT: torch.Tensor | None,
    kv_lag_BT: torch.Tensor | None,
    mask_BT: torch.Tensor,
    is_clipped_BT: torch.Tensor,
) -> Metrics:
    """Return the fraction of stale tokens, their clipped fraction, and the mean KV lag.

    Tokens with a policy lag above 0 are stale. Metrics of a lag that is None are left out.
    """
    metrics = {}
    if policy_lag_BT is not None:
        is_stale_BT = (policy_lag_BT > 0) & mask_BT
        metrics["stale_fraction"] = masked_mean(is_stale_BT, mask_BT)
        metrics["stale_clip_fraction"] = masked_mean(is_clipped_BT, is_stale_BT)
    if kv_lag_BT is not None:
        metrics["kv_lag_mean"] = masked_mean(kv_lag_BT, mask_BT)
    return metrics


def lag_table(
    policy_lag_BT: torch.Tensor | None,
    kv_lag_BT: torch.Tensor | None,
    mask_BT: torch.Tensor,
    terms: TokenLosses,
    log_ratio_BT: torch.Tensor,
    is_dropped_BT: torch.Tensor,
) -> torch.Tensor | None:
    """Return the CELL_METRICS of each cell (policy lag x KV lag), [C, len(CELL_METRICS)].

    Empty cells have 0. `log_ratio_BT` is log pi - log behaviour. Returns None if a lag is None.
    """
    if policy_lag_BT is None or kv_lag_BT is None:
        return None
    num_cells = len(POLICY_LAG_NAMES) * len(KV_LAG_NAMES)
    cell_BT = _cells(policy_lag_BT, POLICY_LAG_EDGES) * len(KV_LAG_NAMES)
    cell_BT = (cell_BT + _cells(kv_lag_BT, KV_LAG_EDGES)).masked_fill(~mask_BT, num_cells)
    weight_BT = log_ratio_BT.exp()
    per_token = [
        torch.ones_like(weight_BT),
        terms.ratio_BT,
        weight_BT,
        weight_BT.square(),
        weight_BT - log_ratio_BT - 1.0,
        terms.is_clipped_BT.float(),
        is_dropped_BT.float(),
    ]
    values_SN = torch.stack([value.flatten() for value in per_token])
    sums_SC = values_SN.new_zeros(len(values_SN), num_cells + 1)
    sums_SC.index_add_(1, cell_BT.flatten(), values_SN.masked_fill(~mask_BT.flatten(), 0.0))
    count, ratio, weight, square, kl, clipped, dropped = sums_SC[:, :num_cells]
    at_least_one = count.clamp(min=1.0)
    columns = [
        count / mask_BT.sum().clamp(min=1),
        ratio / at_least_one,
        weight / at_least_one,
        weight.square() / (at_least_one * square.clamp(min=1e-30)),
        kl / at_least_one,
        clipped / at_least_one,
        dropped / at_least_one,
    ]
    return torch.stack(columns, dim=1)


def to_floats(metrics: Metrics, table: torch.Tensor | None) -> dict[str, float]:
    """Return the metrics and the nonempty cells of the lag table, by one device-to-host copy."""
    values = torch.stack([value.float() for value in metrics.values()])
    cells = values.new_zeros(0) if table is None else table.flatten()
    floats = torch.cat([values, cells]).tolist()
    result = dict(zip(metrics, floats, strict=False))
    names = [(policy, kv) for policy in POLICY_LAG_NAMES for kv in KV_LAG_NAMES]
    for index, (policy, kv) in enumerate(names if table is not None else ()):
        start = len(metrics) + index * len(CELL_METRICS)
        if floats[start] > 0.0:
            cell = zip(CELL_METRICS, floats[start:], strict=False)
            result |= {f"by_lag/policy_{policy}_kv_{kv}/{name}": value for name, value in cell}
    return result


def masked_mean(values_BT: torch.Tensor, mask_BT: torch.Tensor) -> torch.Tensor:
    """Return the mean over the mask, or 0 for an empty mask."""
    return values_BT.float().masked_fill(~mask_BT, 0.0).sum() / mask_BT.sum().clamp(min=1)


def _spread(prefix: str, values_BT: torch.Tensor, mask_BT: torch.Tensor) -> Metrics:
    deviation_BT = values_BT - masked_mean(values_BT, mask_BT)
    smallest = values_BT.masked_fill(~mask_BT, torch.inf).amin()
    largest = values_BT.masked_fill(~mask_BT, -torch.inf).amax()
    return {
        f"{prefix}std": masked_mean(deviation_BT.square(), mask_BT).sqrt(),
        f"{prefix}min": torch.where(mask_BT.any(), smallest, 0.0),
        f"{prefix}max": torch.where(mask_BT.any(), largest, 0.0),
    }


def _cells(lag_BT: torch.Tensor, edges: tuple[float, ...]) -> torch.Tensor:
    return torch.stack([lag_BT > edge for edge in edges]).sum(dim=0)
