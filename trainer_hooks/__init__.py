"""What a training loop calls: phases, weight sync, advantages, losses, metrics, checkpoints."""

from trainer_hooks.advantages import group_advantages, has_reward_spread
from trainer_hooks.checkpoint import TrainerState, find_checkpoint, load_checkpoint, save_checkpoint
from trainer_hooks.collate import RolloutBatch, collate_rollouts
from trainer_hooks.logprobs import token_logprobs
from trainer_hooks.losses import PolicyLossConfig, policy_loss
from trainer_hooks.metrics import MetricsLogger
from trainer_hooks.phase import GenerationPhase, generation_phase
from trainer_hooks.weight_sync import InProcessWeightSync

__all__ = [
    "GenerationPhase",
    "InProcessWeightSync",
    "MetricsLogger",
    "PolicyLossConfig",
    "RolloutBatch",
    "TrainerState",
    "collate_rollouts",
    "find_checkpoint",
    "generation_phase",
    "group_advantages",
    "has_reward_spread",
    "load_checkpoint",
    "policy_loss",
    "save_checkpoint",
    "token_logprobs",
]
