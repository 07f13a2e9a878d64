"""Metrics of one training step, computed from what the step already has.

Shape letters: B rollouts, T positions, P prompts, G rollouts per prompt.
"""

from __future__ import annotations

import torch

from rollout.errors import ConfigError
from trainer_hooks.collate import RolloutBatch
from trainer_hooks.phase import PhaseTimings


def rollout_metrics(batch: RolloutBatch, group_size: int) -> dict[str, float]:
    """Reward, length and staleness of a batch whose rows are groups of `group_size` in turn.

    Failed rollouts count in `failed_fraction` only. `reward_std` is the deviation within a group,
    averaged over groups. Staleness is in versions, over the tokens to be trained on:
    `policy_staleness` is the age of the weights that sampled a token, `kv_cache_staleness` that of
    the weights which wrote its KV entry. Raises ConfigError if the rows are not whole groups.
    """
    if group_size < 1 or len(batch) % group_size:
        raise ConfigError(f"{len(batch)} rollouts are not groups of group_size={group_size}")
    rewards_PG = batch.rewards_B.view(-1, group_size)
    valid_PG = ~rewards_PG.isnan()
    num_valid_P = valid_PG.sum(dim=1).clamp(min=1)
    mean_P = rewards_PG.nansum(dim=1) / num_valid_P
    deviation_PG = torch.where(valid_PG, rewards_PG - mean_P[:, None], 0.0)
    std_P = (deviation_PG.square().sum(dim=1) / (num_valid_P - 1).clamp(min=1)).sqrt()
    lengths_N = batch.completion_lengths_B[valid_PG.flatten()].float()
    policy_staleness_N = batch.policy_lag_BT[batch.mask_BT].float()
    kv_staleness_N = batch.kv_staleness_BT[batch.mask_BT].float()
    return {
        "reward": _mean(rewards_PG[valid_PG]),
        "reward_std": _mean(std_P),
        "failed_fraction": 1.0 - _mean(valid_PG.float()),
        "prompts/num_tokens": int(batch.prompt_lengths_B.sum()),
        "completions/mean_length": _mean(lengths_N),
        "completions/max_length": _max(lengths_N),
        "completions/num_tokens": int(batch.completion_lengths_B.sum()),
        "policy_staleness/mean": _mean(policy_staleness_N),
        "policy_staleness/max": _max(policy_staleness_N),
        "policy_staleness/stale_fraction": _mean((policy_staleness_N >= 1.0).float()),
        "kv_cache_staleness/mean": _mean(kv_staleness_N),
        "kv_cache_staleness/max": _max(kv_staleness_N),
    }


def timing_metrics(
    timings: PhaseTimings, train_s: float, num_generated_tokens: int
) -> dict[str, float]:
    """Where the seconds of one step went, and how fast it generated."""
    return {
        "completions/tokens_per_s": num_generated_tokens / max(timings.generate_s, 1e-9),
        "timing_s/update": timings.update_s,
        "timing_s/resume": timings.resume_s,
        "timing_s/generate": timings.generate_s,
        "timing_s/suspend": timings.suspend_s,
        "timing_s/train": train_s,
    }


def _mean(values: torch.Tensor) -> float:
    return float(values.mean()) if values.numel() else 0.0


def _max(values: torch.Tensor) -> float:
    return float(values.max()) if values.numel() else 0.0
