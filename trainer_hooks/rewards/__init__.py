"""Reward functions: how they are called, combined, and kept from blocking."""

from trainer_hooks.rewards.adapters import VerlReward, WeightedRewards
from trainer_hooks.rewards.runner import RewardRunner

__all__ = ["RewardRunner", "VerlReward", "WeightedRewards"]
