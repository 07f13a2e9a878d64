"""Policy-gradient losses on token log-probs, and what they say about themselves.

Shape letters: B rollouts, T positions of prompt + completion, right padded. Column t of a
log-prob tensor is the log-prob of token t; the mask is 1 on the tokens to be trained on.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from rollout.errors import ConfigError

POLICY_LOSS_KINDS = ("grpo",)


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyLossConfig:
    """Which policy loss, and its constants; checked when it is made.

    `clip_low`, `clip_high`: the ratio is clipped to [1 - clip_low, 1 + clip_high]; a larger upper
    side leaves room for unlikely tokens ("clip higher", DAPO, Yu et al. 2025, sec. 3.1).
    `importance_cap`: bound on the weight exp(proximal - behaviour), used when proximal log-probs
    are given (truncated importance sampling, Espeholt et al. 2018, sec. 4.1).
    `kl_coefficient`: weight of the KL term against the reference policy; 0 leaves it out.
    Raises ConfigError for a kind that does not exist or a value out of its range.
    """

    kind: str = "grpo"
    clip_low: float = 0.2
    clip_high: float = 0.28
    importance_cap: float = 2.0
    kl_coefficient: float = 0.0

    def __post_init__(self) -> None:
        if self.kind not in POLICY_LOSS_KINDS:
            raise ConfigError(
                f"kind={self.kind!r} is no policy loss; available: {', '.join(POLICY_LOSS_KINDS)}"
            )
        if not 0.0 < self.clip_low <= 1.0:
            raise ConfigError(f"clip_low={self.clip_low} must be in (0, 1]")
        if not self.clip_high > 0.0:
            raise ConfigError(f"clip_high={self.clip_high} must be above 0")
        if not self.importance_cap > 0.0:
            raise ConfigError(f"importance_cap={self.importance_cap} must be above 0")
        if not 0.0 <= self.kl_coefficient < math.inf:
            raise ConfigError(f"kl_coefficient={self.kl_coefficient} must be 0 or more, and finite")


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
    aggregation_denominator: float | None = None,
) -> tuple[torch.Tensor, dict[str, float]]:
    """The clipped loss of one batch (a scalar with a gradient to `logprobs_BT`) and its metrics.

    Per token -min(r A, clip(r) A), summed over the mask and divided by the number of its tokens,
    or by `aggregation_denominator`: give the token count of the whole batch to every micro-batch
    of it, and their gradients add up to the gradient of the batch.
    r = exp(logprobs - behaviour). With `proximal_logprobs_BT`, those of the policy at the start of
    this update, r = exp(logprobs - proximal) is clipped instead and each token is weighted with
    min(exp(proximal - behaviour), importance_cap): staleness is corrected, the step is bounded.
    The lags only add metrics: how many tokens are stale, how often those are clipped, the KV lag.
    `advantages_BT` may be [B, 1]. Values outside the mask are never looked at, NaN included.
    Raises ConfigError for shapes that differ and for a KL term without reference log-probs.
    Sources: PPO (Schulman et al. 2017), eq. 7; DeepSeekMath (Shao et al. 2024), eq. 3;
    decoupled proximal policy: Hilton et al. 2021, sec. 3, and AReaL (Fu et al. 2025), sec. 5.2.
    """
    same_shape = (behaviour_logprobs_BT, mask_BT, reference_logprobs_BT, proximal_logprobs_BT)
    _check_shapes(logprobs_BT, advantages_BT, (*same_shape, policy_lag_BT, kv_lag_BT))
    # Only the trained tokens from here on (N of them): padding may hold anything.
    mask_BT = mask_BT.bool()
    logprobs_N = logprobs_BT[mask_BT].float()
    behaviour_N = _constants(behaviour_logprobs_BT, mask_BT)
    anchor_N = behaviour_N
    if proximal_logprobs_BT is not None:
        anchor_N = _constants(proximal_logprobs_BT, mask_BT)
    advantages_N = _constants(advantages_BT.expand_as(logprobs_BT), mask_BT)
    losses_N, is_clipped_N, metrics = _clipped_losses(logprobs_N, anchor_N, advantages_N, config)
    metrics["approx_kl"] = _mean(kl_estimate(behaviour_N, logprobs_N.detach()))
    metrics["entropy"] = _mean(-logprobs_N.detach())
    if proximal_logprobs_BT is not None:
        weight_N = (anchor_N - behaviour_N).exp()
        losses_N = weight_N.clamp(max=config.importance_cap) * losses_N
        metrics["importance_weight_mean"] = _mean(weight_N)
        metrics["importance_cap_fraction"] = _mean(weight_N > config.importance_cap)
    if config.kl_coefficient > 0.0:
        if reference_logprobs_BT is None:
            raise ConfigError(f"{config.kl_coefficient=} needs reference_logprobs_BT")
        reference_kl_N = kl_estimate(logprobs_N, _constants(reference_logprobs_BT, mask_BT))
        losses_N = losses_N + config.kl_coefficient * reference_kl_N
        metrics["reference_kl"] = _mean(reference_kl_N.detach())
    metrics |= _staleness_metrics(policy_lag_BT, kv_lag_BT, mask_BT, is_clipped_N)
    loss = losses_N.sum() / (aggregation_denominator or max(len(losses_N), 1))
    return loss, _to_floats({"loss": loss.detach(), **metrics})


def _clipped_losses(
    logprobs_N: torch.Tensor,
    anchor_N: torch.Tensor,
    advantages_N: torch.Tensor,
    config: PolicyLossConfig,
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """The clipped loss of each token, whether the clip cut its gradient off, and metrics."""
    ratio_N = (logprobs_N - anchor_N).exp()
    free_N = ratio_N * advantages_N
    clipped_N = ratio_N.clamp(1.0 - config.clip_low, 1.0 + config.clip_high) * advantages_N
    is_clipped_N = clipped_N < free_N
    metrics = {"ratio_mean": _mean(ratio_N.detach()), "clip_fraction": _mean(is_clipped_N)}
    return -torch.minimum(free_N, clipped_N), is_clipped_N, metrics


def _staleness_metrics(
    policy_lag_BT: torch.Tensor | None,
    kv_lag_BT: torch.Tensor | None,
    mask_BT: torch.Tensor,
    is_clipped_N: torch.Tensor,
) -> dict[str, torch.Tensor]:
    """How many tokens are stale and how often those are clipped; the mean age of the KV."""
    metrics = {}
    if policy_lag_BT is not None:
        is_stale_N = policy_lag_BT[mask_BT] > 0
        metrics["stale_fraction"] = _mean(is_stale_N)
        metrics["stale_clip_fraction"] = _mean(is_clipped_N[is_stale_N])
    if kv_lag_BT is not None:
        metrics["kv_lag_mean"] = _mean(kv_lag_BT[mask_BT])
    return metrics


def kl_estimate(sampled_logprobs: torch.Tensor, other_logprobs: torch.Tensor) -> torch.Tensor:
    """Per token, unbiased and never negative: KL(sampled || other), from the sampled token alone.

    Source: "k3" of Schulman, Approximating KL divergence (2020); DeepSeekMath, eq. 4.
    """
    log_ratio = other_logprobs - sampled_logprobs
    return log_ratio.exp() - log_ratio - 1.0


def _constants(values_BT: torch.Tensor, mask_BT: torch.Tensor) -> torch.Tensor:
    """The values of the trained tokens, without a gradient."""
    return values_BT.detach()[mask_BT].float()


def _mean(values_N: torch.Tensor) -> torch.Tensor:
    """The mean, and 0 of nothing: a batch may hold no trained token."""
    return values_N.float().sum() / max(len(values_N), 1)


def _to_floats(metrics: dict[str, torch.Tensor]) -> dict[str, float]:
    """All metrics in one device-to-host copy."""
    return dict(zip(metrics, torch.stack(list(metrics.values())).tolist(), strict=True))


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
            f"advantages_BT has shape {tuple(advantages_BT.shape)}; {shape} or {(shape[0], 1)} is "
            "wanted"
        )
