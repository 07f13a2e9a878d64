"""Metrics of one training step, from its batch and its times. docs/metrics.md lists the names.

Used by users' training loops, `trainer_hooks.producer.batches` and `trainer_hooks.train.main`. No
function has side effects.

Shape letters: R rollouts, B rows (token sequences of rollouts), T positions, P prompts, G rollouts
per prompt, N the values of a metric.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rollout.errors import ConfigError
from trainer_hooks.collate import RolloutBatch
from trainer_hooks.metrics.figures import rate
from trainer_hooks.metrics.histogram import histogram_columns
from trainer_hooks.metrics.time_account import StepTimes

_NO_LAG = 2**30  # above every lag


def rollout_metrics(
    batch: RolloutBatch,
    group_size: int,
    *,
    finish_reasons: Sequence[str | None] | None = None,
    entropy: float | None = None,
) -> dict[str, float]:
    """Return metrics of reward, length and staleness of a batch.

    The rollouts are successive groups of `group_size`. Failed rollouts count only in
    `failed_fraction` and in the totals `prompts/num_tokens` and `completions/num_tokens`.
    `reward_std` is the mean over groups of the standard deviation within a group, 0 for a group of
    fewer than two rewards.
    Staleness is in versions, over the trained tokens. `policy_staleness` is the age of the weights
    that sampled a token. `kv_cache_staleness` is the age of the weights that wrote the token's KV
    entry. `kv_lag` is the sampling version minus the mean version of the KV that the token attended
    to.
    `finish_reasons`: one per rollout. "length" means truncated. None leaves out the metrics of
    truncated completions.
    `entropy`: the policy's mean entropy per token. None leaves it out.
    Raises ConfigError if the rollouts do not form whole groups, or if the number of finish reasons
    differs.
    """
    num_rollouts = batch.num_rollouts
    if group_size < 1 or num_rollouts % group_size:
        raise ConfigError(f"{num_rollouts} rollouts are not groups of group_size={group_size}")
    if finish_reasons is not None and len(finish_reasons) != num_rollouts:
        raise ConfigError(f"{len(finish_reasons)} finish reasons for {num_rollouts} rollouts")
    valid_R = ~batch.rewards_R.isnan()
    lengths_N = batch.per_rollout(batch.completion_lengths_B)[valid_R].float()
    metrics = {
        **_reward_metrics(batch.rewards_R.view(-1, group_size)),
        "prompts/num_tokens": int(batch.prompt_lengths_B[batch.first_row_R].sum()),
        "completions/mean_length": _mean(lengths_N),
        "completions/min_length": _min(lengths_N),
        "completions/max_length": _max(lengths_N),
        "completions/num_tokens": int(batch.completion_lengths_B.sum()),
        **_lag_metrics("policy_staleness", batch.policy_lag_BT[batch.mask_BT]),
        **_lag_metrics("kv_cache_staleness", batch.kv_staleness_BT[batch.mask_BT]),
        **_lag_metrics("kv_lag", batch.kv_lag_BT[batch.mask_BT]),
    }
    metrics["policy_staleness/num_mixed_rollouts"] = _num_mixed(batch)
    stale_N = batch.policy_lag_BT[batch.mask_BT] >= 1
    metrics["policy_staleness/stale_fraction"] = _mean(stale_N.float())
    if finish_reasons is not None:
        is_cut_R = torch.tensor([reason == "length" for reason in finish_reasons])
        metrics |= _cut_metrics(is_cut_R[valid_R], lengths_N)
    if entropy is not None:
        metrics["entropy"] = entropy
    return metrics


def step_metrics(
    times: StepTimes, *, num_generated_tokens: int, num_trained_tokens: int
) -> dict[str, float]:
    """Return the times of a step, and its tokens per second.

    Both rates divide by the step's wall time, even if engines generated the batch during an earlier
    step.
    `num_generated_tokens`: sampled tokens of the step's batch.
    `num_trained_tokens`: tokens of the batch that were trained on.
    """
    return {
        **times.as_metrics(),
        "completions/tokens_per_s": rate(num_generated_tokens, times.wall_s),
        "train/tokens_per_s": rate(num_trained_tokens, times.wall_s),
    }


def _num_mixed(batch: RolloutBatch) -> int:
    # Rollouts whose trained tokens were sampled by several versions.
    lags_BT, mask_BT = batch.policy_lag_BT, batch.mask_BT
    if not bool(mask_BT.any()):
        return 0
    oldest_B = lags_BT.masked_fill(~mask_BT, 0).amax(dim=1)
    newest_B = lags_BT.masked_fill(~mask_BT, _NO_LAG).amin(dim=1)
    empty_R = oldest_B.new_zeros(batch.num_rollouts)
    oldest_R = empty_R.scatter_reduce(0, batch.rollout_index_B, oldest_B, "amax")
    newest_R = (empty_R + _NO_LAG).scatter_reduce(0, batch.rollout_index_B, newest_B, "amin")
    return int((oldest_R > newest_R).sum())


def _reward_metrics(rewards_PG: torch.Tensor) -> dict[str, float]:
    valid_PG = ~rewards_PG.isnan()
    num_valid_P = valid_PG.sum(dim=1)
    mean_P = rewards_PG.nansum(dim=1) / num_valid_P.clamp(min=1)
    deviation_PG = torch.where(valid_PG, rewards_PG - mean_P[:, None], 0.0)
    std_P = (deviation_PG.square().sum(dim=1) / (num_valid_P - 1).clamp(min=1)).sqrt()
    rewards_N = rewards_PG[valid_PG]
    has_valid_P = num_valid_P > 0
    # The mean of equal rewards may be rounded, so a comparison with 0 would miss some groups.
    is_flat_P = std_P <= 1e-6 * mean_P.abs().clamp(min=1.0)
    return {
        "reward": _mean(rewards_N),
        "reward_std": _mean(std_P),
        "reward/min": _min(rewards_N),
        "reward/max": _max(rewards_N),
        "frac_reward_zero_std": _mean(is_flat_P[has_valid_P].float()),
        "failed_fraction": 1.0 - _mean(valid_PG.float()),
    }


def _cut_metrics(is_cut_N: torch.Tensor, lengths_N: torch.Tensor) -> dict[str, float]:
    ended_N = lengths_N[~is_cut_N]
    return {
        "completions/clipped_ratio": _mean(is_cut_N.float()),
        "completions/mean_terminated_length": _mean(ended_N),
        "completions/min_terminated_length": _min(ended_N),
        "completions/max_terminated_length": _max(ended_N),
    }


def _lag_metrics(name: str, lags_N: torch.Tensor) -> dict[str, float]:
    values_N = lags_N.float()
    return {
        f"{name}/mean": _mean(values_N),
        f"{name}/max": _max(values_N),
        **histogram_columns(name, values_N),
    }


def _mean(values: torch.Tensor) -> float:
    return float(values.mean()) if values.numel() else 0.0


def _min(values: torch.Tensor) -> float:
    return float(values.min()) if values.numel() else 0.0


def _max(values: torch.Tensor) -> float:
    return float(values.max()) if values.numel() else 0.0
