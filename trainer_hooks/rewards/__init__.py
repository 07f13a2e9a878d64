"""Reward functions: calling and combining users' own, adapting TRL's and verl's, ready-made ones.

Used by users' training loops, `trainer_hooks.train`, the producer and `evaluate`.
"""

from trainer_hooks.rewards.adapters import (
    ConversationalReward,
    VerlReward,
    WeightedReward,
    WeightedRewards,
    reward_metrics,
)
from trainer_hooks.rewards.failures import RewardFailed, RewardFunctionError
from trainer_hooks.rewards.ready_made import FormatReward, LengthReward, reasoning_gym_reward
from trainer_hooks.rewards.reward_model import BatchedReward, RewardModel
from trainer_hooks.rewards.runner import RewardRunner, as_runner
from trainer_hooks.rewards.scoring import score_rollouts
from trainer_hooks.rewards.text_match import (
    NumberReward,
    edit_similarity_reward,
    exact_match_reward,
)

__all__ = [
    "BatchedReward",
    "ConversationalReward",
    "FormatReward",
    "LengthReward",
    "NumberReward",
    "RewardFailed",
    "RewardFunctionError",
    "RewardModel",
    "RewardRunner",
    "VerlReward",
    "WeightedReward",
    "WeightedRewards",
    "as_runner",
    "edit_similarity_reward",
    "exact_match_reward",
    "reasoning_gym_reward",
    "reward_metrics",
    "score_rollouts",
]
