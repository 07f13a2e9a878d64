"""The functions and classes that a training loop calls, listed in the order of a loop.

    prompts    PromptItem, PromptLedger, Curriculum; files: trainer_hooks.prompts.sources
    generate   generation_phase around LLM.submit and LLM.collect, or AsyncRolloutProducer, which
               makes batches beside the training; ThreadedLLM for an LLM in this process
    reward     RewardRunner, WeightedRewards, VerlReward, overlong_penalties
    collate    collate_rollouts -> RolloutBatch; a TrainingBatch of the producer holds one
    advantage  group_advantages, reinforce_plus_plus_advantages, or gae_advantages with a critic
    loss       head_logits, token_logprobs, token_entropies, policy_loss, PolicyLossConfig,
               value_loss
    update     update_policy: passes, minibatches, micro-batches by tokens, packing; replay_routing:
               passes of a mixture with the experts that its rollouts used; ReferencePolicy
    push       WeightSync; join_push on ranks without an engine; full_tensors, merged_tensors
    measure    evaluate, MetricsLogger; more in trainer_hooks.metrics
    save       save_checkpoint, find_checkpoint, load_checkpoint, WeightsVersionCounter

Used by users' training loops, the examples, the benchmarks and the training job
(`trainer_hooks.train`: Hydra configs, a dashboard, the files of a run). examples/grpo_minimal.py
and examples/async_minimal.py are whole loops.
"""

import warnings as _warnings
from importlib import import_module as _import_module
from typing import Any as _Any

from rollout.apis.threaded_llm import ThreadedLLM
from trainer_hooks.checkpoint import (
    TrainerState,
    WeightsVersionCounter,
    find_checkpoint,
    load_checkpoint,
    read_trainer_state,
    save_checkpoint,
)
from trainer_hooks.collate import RolloutBatch, collate_rollouts
from trainer_hooks.evaluate import evaluate
from trainer_hooks.losses import (
    OffPolicyCorrection,
    PolicyLossConfig,
    effective_sample_size,
    kl_estimate,
    policy_loss,
    token_rewards,
    value_loss,
)
from trainer_hooks.losses.advantages import (
    gae_advantages,
    group_advantages,
    has_reward_spread,
    overlong_penalties,
    reinforce_plus_plus_advantages,
)
from trainer_hooks.losses.logprobs import head_logits, token_entropies, token_logprobs
from trainer_hooks.losses.replay_routing import replay_routing
from trainer_hooks.metrics import MetricsLogger
from trainer_hooks.phase import GenerationPhase, generation_phase
from trainer_hooks.producer import (
    AsyncRolloutProducer,
    ProducerError,
    RolloutLLM,
    ScoredGroup,
    TrainingBatch,
)
from trainer_hooks.producer.filters import RewardRangeFilter
from trainer_hooks.prompts.curriculum import Curriculum, learnability_weight
from trainer_hooks.prompts.history import PromptHistory
from trainer_hooks.prompts.ledger import PromptItem, PromptLedger
from trainer_hooks.rewards import RewardFunctionError, RewardRunner, VerlReward, WeightedRewards
from trainer_hooks.rollouts import Rollout
from trainer_hooks.update.guarded_step import GuardedStep, NonFiniteGradientError, clip_gradients
from trainer_hooks.update.micro_batches import (
    UpdateSettings,
    accumulate_gradients,
    compute_logprobs,
    split_micro_batches,
    update_policy,
)
from trainer_hooks.update.reference import ReferencePolicy, ReferenceSettings
from trainer_hooks.weight_sync import (
    CheckpointWeightSync,
    CollectiveWeightSync,
    InProcessWeightSync,
    SharedMemoryWeightSync,
    WeightSync,
    full_tensors,
    join_push,
    merged_tensors,
)

__all__ = [
    # prompts
    "PromptItem",
    "PromptLedger",
    "PromptHistory",
    "Curriculum",
    "learnability_weight",
    # generate
    "GenerationPhase",
    "generation_phase",
    "AsyncRolloutProducer",
    "TrainingBatch",
    "ScoredGroup",
    "Rollout",
    "RolloutLLM",
    "RewardRangeFilter",
    "ProducerError",
    "ThreadedLLM",
    # reward
    "RewardRunner",
    "RewardFunctionError",
    "VerlReward",
    "WeightedRewards",
    "overlong_penalties",
    "token_rewards",
    # collate
    "RolloutBatch",
    "collate_rollouts",
    # advantage
    "gae_advantages",
    "group_advantages",
    "has_reward_spread",
    "reinforce_plus_plus_advantages",
    # loss
    "head_logits",
    "token_logprobs",
    "token_entropies",
    "policy_loss",
    "PolicyLossConfig",
    "OffPolicyCorrection",
    "kl_estimate",
    "value_loss",
    "effective_sample_size",
    # update
    "GuardedStep",
    "NonFiniteGradientError",
    "UpdateSettings",
    "update_policy",
    "accumulate_gradients",
    "clip_gradients",
    "compute_logprobs",
    "ReferencePolicy",
    "ReferenceSettings",
    "replay_routing",
    "split_micro_batches",
    # push
    "WeightSync",
    "InProcessWeightSync",
    "SharedMemoryWeightSync",
    "CollectiveWeightSync",
    "CheckpointWeightSync",
    "full_tensors",
    "merged_tensors",
    "join_push",
    # measure
    "evaluate",
    "MetricsLogger",
    # save
    "TrainerState",
    "WeightsVersionCounter",
    "find_checkpoint",
    "load_checkpoint",
    "read_trainer_state",
    "save_checkpoint",
]

# Module and name that replace each deprecated name. Version 0.14 removes the deprecated names.
_RENAMED = {
    "take_part": ("trainer_hooks", "join_push"),
    "fixed_logprobs": ("trainer_hooks", "compute_logprobs"),
    "learnability": ("trainer_hooks", "learnability_weight"),
    "split_by_tokens": ("trainer_hooks", "split_micro_batches"),
    "ScopedLLM": ("trainer_hooks", "RolloutLLM"),
    "RewardBounds": ("trainer_hooks", "RewardRangeFilter"),
    "PromptTicket": ("trainer_hooks.prompts.ledger", "PromptTicket"),
    "read_own_state": ("trainer_hooks.checkpoint", "read_own_state"),
}


def __getattr__(name: str) -> _Any:
    if name not in _RENAMED:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, new_name = _RENAMED[name]
    _warnings.warn(
        f"trainer_hooks.{name} is now {module}.{new_name}; the old name goes in version 0.14",
        DeprecationWarning,
        stacklevel=2,
    )
    return getattr(_import_module(module), new_name)
