"""What a training loop calls: phases, weight sync, advantages, losses, metrics, checkpoints."""

from trainer_hooks.advantages import (
    gae_advantages,
    group_advantages,
    has_reward_spread,
    overlong_penalties,
)
from trainer_hooks.checkpoint import TrainerState, find_checkpoint, load_checkpoint, save_checkpoint
from trainer_hooks.collate import RolloutBatch, collate_rollouts
from trainer_hooks.evaluate import evaluate
from trainer_hooks.logprobs import token_entropies, token_logprobs
from trainer_hooks.losses import (
    OffPolicyCorrection,
    PolicyLossConfig,
    effective_sample_size,
    kl_estimate,
    policy_loss,
    token_rewards,
    value_loss,
)
from trainer_hooks.metrics import MetricsLogger
from trainer_hooks.phase import GenerationPhase, generation_phase
from trainer_hooks.producer import (
    AsyncRolloutProducer,
    ProducerError,
    ScopedLLM,
    ScoredGroup,
    TrainingBatch,
)
from trainer_hooks.prompt_item import PromptItem
from trainer_hooks.prompt_ledger import PromptLedger, PromptTicket
from trainer_hooks.rewards import RewardFunctionError, RewardRunner, VerlReward, WeightedRewards
from trainer_hooks.rollouts import Rollout
from trainer_hooks.threaded_llm import ThreadedLLM
from trainer_hooks.weight_sync import InProcessWeightSync, SharedMemoryWeightSync, full_tensors

__all__ = [
    "AsyncRolloutProducer",
    "GenerationPhase",
    "InProcessWeightSync",
    "MetricsLogger",
    "OffPolicyCorrection",
    "PolicyLossConfig",
    "ProducerError",
    "PromptItem",
    "PromptLedger",
    "PromptTicket",
    "RewardFunctionError",
    "RewardRunner",
    "Rollout",
    "RolloutBatch",
    "ScopedLLM",
    "ScoredGroup",
    "SharedMemoryWeightSync",
    "ThreadedLLM",
    "TrainerState",
    "TrainingBatch",
    "VerlReward",
    "WeightedRewards",
    "collate_rollouts",
    "effective_sample_size",
    "evaluate",
    "find_checkpoint",
    "full_tensors",
    "gae_advantages",
    "generation_phase",
    "group_advantages",
    "has_reward_spread",
    "kl_estimate",
    "load_checkpoint",
    "overlong_penalties",
    "policy_loss",
    "save_checkpoint",
    "token_entropies",
    "token_logprobs",
    "token_rewards",
    "value_loss",
]
