"""Reward functions: how they are called, combined, and kept from blocking."""

from trainer_hooks.rewards.adapters import VerlReward, WeightedRewards
from trainer_hooks.rewards.failures import RewardFailed, RewardFunctionError
from trainer_hooks.rewards.runner import RewardRunner, as_runner
from trainer_hooks.rewards.scoring import score_rollouts

__all__ = [
    "RewardFailed",
    "RewardFunctionError",
    "RewardRunner",
    "VerlReward",
    "WeightedRewards",
    "as_runner",
    "score_rollouts",
]
