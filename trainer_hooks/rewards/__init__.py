"""Reward functions: how they are called, combined, and kept from blocking."""

from trainer_hooks.rewards.adapters import VerlReward, WeightedRewards
from trainer_hooks.rewards.runner import RewardRunner
from trainer_hooks.rewards.scoring import score_rollouts

__all__ = ["RewardRunner", "VerlReward", "WeightedRewards", "score_rollouts"]
