"""Reward functions: calling and combining your own, adapting TRL's and verl's, ready-made ones."""

from trainer_hooks.rewards.adapters import ConversationalReward as ConversationalReward
from trainer_hooks.rewards.adapters import VerlReward as VerlReward
from trainer_hooks.rewards.adapters import WeightedReward as WeightedReward
from trainer_hooks.rewards.adapters import WeightedRewards as WeightedRewards
from trainer_hooks.rewards.adapters import reward_metrics as reward_metrics
from trainer_hooks.rewards.failures import RewardFailed as RewardFailed
from trainer_hooks.rewards.failures import RewardFunctionError as RewardFunctionError
from trainer_hooks.rewards.ready_made import FormatReward as FormatReward
from trainer_hooks.rewards.ready_made import LengthReward as LengthReward
from trainer_hooks.rewards.ready_made import reasoning_gym_reward as reasoning_gym_reward
from trainer_hooks.rewards.reward_model import BatchedReward as BatchedReward
from trainer_hooks.rewards.reward_model import RewardModel as RewardModel
from trainer_hooks.rewards.runner import RewardRunner as RewardRunner
from trainer_hooks.rewards.runner import as_runner as as_runner
from trainer_hooks.rewards.scoring import score_rollouts as score_rollouts
from trainer_hooks.rewards.text_match import NumberReward as NumberReward
from trainer_hooks.rewards.text_match import edit_similarity_reward as edit_similarity_reward
from trainer_hooks.rewards.text_match import exact_match_reward as exact_match_reward

__all__: list[str]
