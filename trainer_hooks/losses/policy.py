"""policy_loss and value_loss: compute one scalar loss and its metrics from a batch.

Used by users' training loops. `trainer_hooks.update.micro_batches` calls policy_loss, and
`trainer_hooks.train.critic` calls value_loss. No function has side effects.

Shape letters: B rows, T positions of prompt and completion, padded on the right. Column t of a
log-prob tensor is the log-prob of token t. The mask is 1 on the tokens to train on.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch

from rollout.errors import ConfigError
from trainer_hooks.losses.config import Aggregation, OffPolicyCorrection, PolicyLossConfig
from trainer_hooks.losses.corrections import correction_weights, sequence_mask
from trainer_hooks.losses.diagnostics import (
    correction_metrics,
    lag_metrics,
    lag_table,
    loss_metrics,
    masked_mean,
    to_floats,
)
from trainer_hooks.losses.kl import kl_losses
from trainer_hooks.losses.terms import (
    TokenLosses,
    aggregate,
    log_ratios,
    token_losses,
    trained_logprobs,
    trained_values,
)

DEFAULT_POLICY_LOSS = PolicyLossConfig()


def policy_loss(
    logprobs_BT: torch.Tensor,
    behaviour_logprobs_BT: torch.Tensor,
    advantages_BT: torch.Tensor,
    mask_BT: torch.Tensor,
    config: PolicyLossConfig = DEFAULT_POLICY_LOSS,
    *,
    reference_logprobs_BT: torch.Tensor | None = None,
    proximal_logprobs_BT: torch.Tensor | None = None,
    policy_lag_BT: torch.Tensor | None = None,
    kv_lag_BT: torch.Tensor | None = None,
    entropies_BT: torch.Tensor | None = None,
    aggregation_denominator: float | None = None,
    rollout_tokens_B: torch.Tensor | None = None,
) -> tuple[torch.Tensor, dict[str, float]]:
    """Return the loss of one batch, a float32 scalar with a gradient to `logprobs_BT`, and metrics.

    loss = aggregate(w * token loss + kl_coefficient * KL - entropy_coefficient * entropy), divided
    by `config.max_completion_length` if that is set.
    `config.kind` selects the token loss, a function of the ratio r = pi / anchor.
    `config.correction` selects the weight w, a function of anchor / behaviour.
    `proximal_logprobs_BT`: log-probs of the policy at the start of this update. If given, the
    anchor is that policy (decoupled PPO: Hilton et al. 2021, arXiv 2110.00641, sec. 3; AReaL, Fu et
    al. 2025, arXiv 2505.24298, sec. 5.2). Otherwise the anchor is the behaviour policy, and w is 1.
    `advantages_BT`: [B, T] or [B, 1].
    `entropies_BT`: result of `token_logprobs(..., return_entropy=True)`, for the entropy bonus and
    the metric `entropy`. The bonus has a gradient to `entropies_BT`.
    `aggregation_denominator`: the `denominator` of `aggregate`.
    `rollout_tokens_B`: as in a RolloutBatch. With it, a rollout of several rows counts once in the
    aggregate. Without it, each row counts. Ratios and masks of sequences are always per row.
    `policy_lag_BT`, `kv_lag_BT`: for metrics of stale tokens, and for a correction that depends on
    lag. If both are given, metrics named `by_lag/*` describe each cell (policy lag x KV lag).
    Values outside the mask are not read, and may be NaN. Log-probs are clamped at MIN_LOGPROB.
    Raises ConfigError for shapes that differ and for a term whose input is missing.
    """
    same_shape = (behaviour_logprobs_BT, mask_BT, reference_logprobs_BT, proximal_logprobs_BT)
    lags = (policy_lag_BT, kv_lag_BT)
    _check_shapes(logprobs_BT, advantages_BT, (*same_shape, *lags, entropies_BT))
    mask_BT = mask_BT.bool()
    logprobs_BT = trained_logprobs(logprobs_BT, mask_BT)
    fixed_BT, behaviour_BT = logprobs_BT.detach(), _constants(behaviour_logprobs_BT, mask_BT)
    advantages_BT = trained_values(advantages_BT.detach().expand_as(logprobs_BT), mask_BT)
    anchor_BT = behaviour_BT
    if proximal_logprobs_BT is not None:
        anchor_BT = _constants(proximal_logprobs_BT, mask_BT)
    terms = token_losses(logprobs_BT, anchor_BT, advantages_BT, mask_BT, config)
    log_ratio_BT = log_ratios(fixed_BT, behaviour_BT, mask_BT)
    metrics = loss_metrics(terms, fixed_BT, anchor_BT, log_ratio_BT, mask_BT, config, entropies_BT)
    losses_BT, of_mask = _masked_losses(terms, log_ratio_BT, advantages_BT, mask_BT, config)
    losses_BT, is_dropped_BT, of_correction = _corrected(
        losses_BT, anchor_BT, behaviour_BT, mask_BT, config.correction, lags
    )
    penalties_BT, of_penalties = _penalties(
        logprobs_BT, behaviour_BT, reference_logprobs_BT, entropies_BT, mask_BT, config
    )
    metrics = metrics | of_mask | of_correction | of_penalties
    divisors = (aggregation_denominator, rollout_tokens_B)
    loss = aggregate(losses_BT + penalties_BT, mask_BT, config.resolved_aggregation, *divisors)
    loss = loss / (config.max_completion_length or 1)
    metrics |= lag_metrics(*lags, mask_BT, terms.is_clipped_BT)
    table = lag_table(*lags, mask_BT, terms, log_ratio_BT, is_dropped_BT)
    return loss, to_floats({"loss": loss.detach(), **metrics}, table)


def _masked_losses(
    terms: TokenLosses,
    log_ratio_BT: torch.Tensor,
    advantages_BT: torch.Tensor,
    mask_BT: torch.Tensor,
    config: PolicyLossConfig,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    if config.max_sequence_kl is None:
        return terms.losses_BT, {}
    is_masked_BT = sequence_mask(log_ratio_BT, advantages_BT, mask_BT, config.max_sequence_kl)
    metrics = {"sequence_mask_fraction": masked_mean(is_masked_BT, mask_BT)}
    return terms.losses_BT.masked_fill(is_masked_BT, 0.0), metrics


def _corrected(
    losses_BT: torch.Tensor,
    anchor_BT: torch.Tensor,
    behaviour_BT: torch.Tensor,
    mask_BT: torch.Tensor,
    correction: OffPolicyCorrection,
    lags: tuple[torch.Tensor | None, torch.Tensor | None],
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Return the corrected losses, which tokens have weight 0 (bool [B, T]), and metrics."""
    correction = _resolved(correction, anchor_BT is not behaviour_BT)
    if anchor_BT is behaviour_BT:
        return losses_BT, torch.zeros_like(mask_BT), {}
    gap_BT = log_ratios(anchor_BT, behaviour_BT, mask_BT)
    weights_BT, flags = correction_weights(gap_BT, mask_BT, correction, *lags)
    metrics = correction_metrics(weights_BT, flags, gap_BT, mask_BT)
    return weights_BT * losses_BT, flags["dropped"], metrics


def _penalties(
    logprobs_BT: torch.Tensor,
    behaviour_BT: torch.Tensor,
    reference_logprobs_BT: torch.Tensor | None,
    entropies_BT: torch.Tensor | None,
    mask_BT: torch.Tensor,
    config: PolicyLossConfig,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    penalties_BT, metrics = torch.zeros_like(behaviour_BT), {}
    if config.kl_coefficient > 0.0:
        if reference_logprobs_BT is None:
            raise ConfigError(f"{config.kl_coefficient=} needs reference_logprobs_BT")
        reference_BT = _constants(reference_logprobs_BT, mask_BT)
        how = (config.kl_estimator, config.kl_importance_weighted)
        kl_BT = kl_losses(logprobs_BT, behaviour_BT, reference_BT, mask_BT, *how)
        penalties_BT = config.kl_coefficient * kl_BT
        metrics["kl"] = masked_mean(kl_BT.detach(), mask_BT)
    if config.entropy_coefficient > 0.0:
        if entropies_BT is None:
            raise ConfigError(f"{config.entropy_coefficient=} needs entropies_BT")
        bonus_BT = config.entropy_coefficient * trained_values(entropies_BT, mask_BT)
        penalties_BT = penalties_BT - bonus_BT
    return penalties_BT, metrics


def _constants(logprobs_BT: torch.Tensor, mask_BT: torch.Tensor) -> torch.Tensor:
    return trained_logprobs(logprobs_BT.detach(), mask_BT)


def _resolved(correction: OffPolicyCorrection, is_proximal: bool) -> OffPolicyCorrection:
    if correction.needs_proximal and not is_proximal:
        # Weighing by present / behaviour instead would leave no ratio to clip.
        raise ConfigError(
            f"correction mode={correction.mode!r} weighs by proximal / behaviour and needs "
            "proximal_logprobs_BT, the policy's log-probs before the first step of this update; "
            "without them choose mode='none', which clips around the behaviour policy"
        )
    if correction.mode != "auto":
        return correction
    return replace(correction, mode="truncate" if is_proximal else "none")


def _check_shapes(
    logprobs_BT: torch.Tensor,
    advantages_BT: torch.Tensor,
    others_BT: Iterable[torch.Tensor | None],
) -> None:
    shape = tuple(logprobs_BT.shape)
    shapes = [tuple(tensor.shape) for tensor in others_BT if tensor is not None]
    if len(shape) != 2 or any(other != shape for other in shapes):
        raise ConfigError(
            f"log-probs, mask and lags must all be of one shape [B, T]; they are {[shape, *shapes]}"
        )
    if tuple(advantages_BT.shape) not in (shape, (shape[0], 1)):
        raise ConfigError(
            f"advantages_BT has shape {tuple(advantages_BT.shape)}; it must be {shape} or "
            f"{(shape[0], 1)}"
        )


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
    """Return half the squared error to the returns, with a gradient to `values_BT`, and metrics.

    The loss of a token is max((V - R)^2, (clip(V) - R)^2) / 2. clip(V) is within `clip_range` of
    the value at the start of the update, so moving V further does not lower the loss. None means no
    clip. The metrics vf_loss, vf_clipfrac and vpred_mean have verl's names. Values outside the mask
    are not read.
    Raises ConfigError for shapes that differ and a clip range that is not above 0.
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
