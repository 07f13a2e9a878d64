"""The functions and classes that a training loop calls, by the modules that define them."""

from rollout.apis.threaded_llm import ThreadedLLM as ThreadedLLM
from trainer_hooks.checkpoint import TrainerState as TrainerState
from trainer_hooks.checkpoint import WeightsVersionCounter as WeightsVersionCounter
from trainer_hooks.checkpoint import find_checkpoint as find_checkpoint
from trainer_hooks.checkpoint import load_checkpoint as load_checkpoint
from trainer_hooks.checkpoint import read_trainer_state as read_trainer_state
from trainer_hooks.checkpoint import save_checkpoint as save_checkpoint
from trainer_hooks.collate import RolloutBatch as RolloutBatch
from trainer_hooks.collate import collate_rollouts as collate_rollouts
from trainer_hooks.evaluation import evaluate as evaluate
from trainer_hooks.losses import OffPolicyCorrection as OffPolicyCorrection
from trainer_hooks.losses import PolicyLossConfig as PolicyLossConfig
from trainer_hooks.losses import effective_sample_size as effective_sample_size
from trainer_hooks.losses import kl_estimate as kl_estimate
from trainer_hooks.losses import policy_loss as policy_loss
from trainer_hooks.losses import token_rewards as token_rewards
from trainer_hooks.losses import value_loss as value_loss
from trainer_hooks.losses.advantages import gae_advantages as gae_advantages
from trainer_hooks.losses.advantages import group_advantages as group_advantages
from trainer_hooks.losses.advantages import has_reward_spread as has_reward_spread
from trainer_hooks.losses.advantages import overlong_penalties as overlong_penalties
from trainer_hooks.losses.advantages import (
    reinforce_plus_plus_advantages as reinforce_plus_plus_advantages,
)
from trainer_hooks.losses.logprobs import head_logits as head_logits
from trainer_hooks.losses.logprobs import token_entropies as token_entropies
from trainer_hooks.losses.logprobs import token_logprobs as token_logprobs
from trainer_hooks.losses.replay_routing import replay_routing as replay_routing
from trainer_hooks.metrics import MetricsLogger as MetricsLogger
from trainer_hooks.phase import GenerationPhase as GenerationPhase
from trainer_hooks.phase import generation_phase as generation_phase
from trainer_hooks.producer import AsyncRolloutProducer as AsyncRolloutProducer
from trainer_hooks.producer import ProducerError as ProducerError
from trainer_hooks.producer import RolloutLLM as RolloutLLM
from trainer_hooks.producer import ScoredGroup as ScoredGroup
from trainer_hooks.producer import TrainingBatch as TrainingBatch
from trainer_hooks.producer.filters import RewardRangeFilter as RewardRangeFilter
from trainer_hooks.prompts.curriculum import Curriculum as Curriculum
from trainer_hooks.prompts.curriculum import learnability_weight as learnability_weight
from trainer_hooks.prompts.history import PromptHistory as PromptHistory
from trainer_hooks.prompts.ledger import PromptItem as PromptItem
from trainer_hooks.prompts.ledger import PromptLedger as PromptLedger
from trainer_hooks.rewards import RewardFunctionError as RewardFunctionError
from trainer_hooks.rewards import RewardRunner as RewardRunner
from trainer_hooks.rewards import VerlReward as VerlReward
from trainer_hooks.rewards import WeightedRewards as WeightedRewards
from trainer_hooks.rollouts import Rollout as Rollout
from trainer_hooks.update.guarded_step import GuardedStep as GuardedStep
from trainer_hooks.update.guarded_step import NonFiniteGradientError as NonFiniteGradientError
from trainer_hooks.update.guarded_step import clip_gradients as clip_gradients
from trainer_hooks.update.micro_batches import UpdateSettings as UpdateSettings
from trainer_hooks.update.micro_batches import accumulate_gradients as accumulate_gradients
from trainer_hooks.update.micro_batches import compute_logprobs as compute_logprobs
from trainer_hooks.update.micro_batches import split_micro_batches as split_micro_batches
from trainer_hooks.update.micro_batches import update_policy as update_policy
from trainer_hooks.update.reference import ReferencePolicy as ReferencePolicy
from trainer_hooks.update.settings import ReferenceSettings as ReferenceSettings
from trainer_hooks.weight_sync import CheckpointWeightSync as CheckpointWeightSync
from trainer_hooks.weight_sync import CollectiveWeightSync as CollectiveWeightSync
from trainer_hooks.weight_sync import InProcessWeightSync as InProcessWeightSync
from trainer_hooks.weight_sync import SharedMemoryWeightSync as SharedMemoryWeightSync
from trainer_hooks.weight_sync import WeightSync as WeightSync
from trainer_hooks.weight_sync import full_tensors as full_tensors
from trainer_hooks.weight_sync import join_push as join_push
from trainer_hooks.weight_sync import merged_tensors as merged_tensors

__all__: list[str]
