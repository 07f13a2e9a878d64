"""What a training loop calls, in the order of a loop.

    prompts    PromptItem, PromptLedger, Curriculum; files: trainer_hooks.prompts.sources
    generate   generation_phase around LLM.submit and LLM.collect, or AsyncRolloutProducer, which
               makes batches beside the training; ThreadedLLM for an LLM in this process
    reward     RewardRunner, WeightedRewards, VerlReward, overlong_penalties
    collate    collate_rollouts -> RolloutBatch (the producer's batches have one: batch.rollouts)
    advantage  group_advantages, reinforce_plus_plus_advantages, or gae_advantages with a critic
    loss       head_logits, token_logprobs, token_entropies, policy_loss, PolicyLossConfig,
               value_loss
    update     update_policy: passes, minibatches, micro-batches by tokens, packing; replay_routing:
               a mixture with the experts of its rollouts; ReferencePolicy
    push       WeightSync; take_part: a rank without an engine; full_tensors, merged_tensors
    measure    evaluate, MetricsLogger; more in trainer_hooks.metrics
    save       save_checkpoint, find_checkpoint, load_checkpoint, WeightsVersionCounter

examples/grpo_minimal.py and examples/async_minimal.py are whole loops. What only jobs need (Hydra
configs, a dashboard, files of a run) is in trainer_hooks.train.
"""

from rollout.apis.threaded_llm import ThreadedLLM
from trainer_hooks.checkpoint import (
    TrainerState,
    WeightsVersionCounter,
    find_checkpoint,
    load_checkpoint,
    read_own_state,
    read_trainer_state,
    save_checkpoint,
)
from trainer_hooks.collate import RolloutBatch, collate_rollouts
from trainer_hooks.evaluate import evaluate
from trainer_hooks.guarded_step import GuardedStep, NonFiniteGradientError, clip_gradients
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
from trainer_hooks.losses.reference import ReferencePolicy, ReferenceSettings
from trainer_hooks.losses.replay_routing import replay_routing
from trainer_hooks.metrics import MetricsLogger
from trainer_hooks.micro_batches import (
    UpdateSettings,
    accumulate_gradients,
    fixed_logprobs,
    split_by_tokens,
    update_policy,
)
from trainer_hooks.phase import GenerationPhase, generation_phase
from trainer_hooks.producer import (
    AsyncRolloutProducer,
    ProducerError,
    ScopedLLM,
    ScoredGroup,
    TrainingBatch,
)
from trainer_hooks.producer.filters import RewardBounds
from trainer_hooks.prompts.curriculum import Curriculum, learnability
from trainer_hooks.prompts.history import PromptHistory
from trainer_hooks.prompts.ledger import PromptItem, PromptLedger, PromptTicket
from trainer_hooks.rewards import RewardFunctionError, RewardRunner, VerlReward, WeightedRewards
from trainer_hooks.rollouts import Rollout
from trainer_hooks.weight_sync import (
    CheckpointWeightSync,
    CollectiveWeightSync,
    InProcessWeightSync,
    SharedMemoryWeightSync,
    WeightSync,
    full_tensors,
    merged_tensors,
    take_part,
)

__all__ = [
    # prompts
    "PromptItem",
    "PromptLedger",
    "PromptTicket",
    "PromptHistory",
    "Curriculum",
    "learnability",
    # generate
    "GenerationPhase",
    "GuardedStep",
    "generation_phase",
    "AsyncRolloutProducer",
    "TrainingBatch",
    "ScoredGroup",
    "Rollout",
    "ScopedLLM",
    "RewardBounds",
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
    "UpdateSettings",
    "update_policy",
    "accumulate_gradients",
    "clip_gradients",
    "fixed_logprobs",
    "ReferencePolicy",
    "ReferenceSettings",
    "replay_routing",
    "split_by_tokens",
    # push
    "WeightSync",
    "InProcessWeightSync",
    "SharedMemoryWeightSync",
    "CollectiveWeightSync",
    "CheckpointWeightSync",
    "full_tensors",
    "merged_tensors",
    "take_part",
    # measure
    "evaluate",
    "MetricsLogger",
    "NonFiniteGradientError",
    # save
    "TrainerState",
    "WeightsVersionCounter",
    "find_checkpoint",
    "load_checkpoint",
    "read_own_state",
    "read_trainer_state",
    "save_checkpoint",
]
