"""The functions and classes that a training loop calls, listed in the order of a loop.

    prompts    PromptItem, PromptLedger, Curriculum. trainer_hooks.prompts.sources reads files.
    generate   generation_phase around LLM.submit and LLM.collect, or AsyncRolloutProducer, which
               makes batches while the trainer trains. ThreadedLLM wraps an LLM of this process.
    reward     RewardRunner, WeightedRewards, VerlReward, overlong_penalties
    collate    collate_rollouts returns a RolloutBatch. A producer's TrainingBatch contains one.
    advantage  group_advantages, reinforce_plus_plus_advantages, or gae_advantages with a critic
    loss       head_logits, token_logprobs, token_entropies, policy_loss, PolicyLossConfig,
               value_loss
    update     update_policy runs the passes, minibatches and micro-batches of one step.
               replay_routing makes a mixture of experts use the experts that sampled the tokens.
               ReferencePolicy computes the log-probs of a fixed model.
    push       WeightSync. Ranks without an engine call join_push. full_tensors and merged_tensors
               read a trainer's weights.
    measure    evaluate, MetricsLogger. trainer_hooks.metrics has more.
    save       save_checkpoint, find_checkpoint, load_checkpoint, WeightsVersionCounter

Used by users' training loops, the examples, the benchmarks and `trainer_hooks.train`, the training
job. examples/grpo_minimal.py and examples/async_minimal.py are whole loops.
"""

import warnings as _warnings
from importlib import import_module as _import_module
from typing import Any as _Any

from rollout.lazy_names import lazy_names as _lazy_names

# Module -> its names in this package. __init__.pyi lists the same names.
_HOMES = {
    "rollout.apis.threaded_llm": "ThreadedLLM",
    "trainer_hooks.checkpoint": (
        "TrainerState WeightsVersionCounter find_checkpoint load_checkpoint "
        "read_trainer_state save_checkpoint"
    ),
    "trainer_hooks.collate": "RolloutBatch collate_rollouts",
    "trainer_hooks.evaluation": "evaluate",
    "trainer_hooks.losses": (
        "OffPolicyCorrection PolicyLossConfig effective_sample_size kl_estimate policy_loss "
        "token_rewards value_loss"
    ),
    "trainer_hooks.losses.advantages": (
        "gae_advantages group_advantages has_reward_spread overlong_penalties "
        "reinforce_plus_plus_advantages"
    ),
    "trainer_hooks.losses.logprobs": "head_logits token_entropies token_logprobs",
    "trainer_hooks.losses.replay_routing": "replay_routing",
    "trainer_hooks.metrics": "MetricsLogger",
    "trainer_hooks.phase": "GenerationPhase generation_phase",
    "trainer_hooks.producer": (
        "AsyncRolloutProducer ProducerError RolloutLLM ScoredGroup TrainingBatch"
    ),
    "trainer_hooks.producer.filters": "RewardRangeFilter",
    "trainer_hooks.prompts.curriculum": "Curriculum learnability_weight",
    "trainer_hooks.prompts.history": "PromptHistory",
    "trainer_hooks.prompts.ledger": "PromptItem PromptLedger",
    "trainer_hooks.rewards": "RewardFunctionError RewardRunner VerlReward WeightedRewards",
    "trainer_hooks.rollouts": "Rollout",
    "trainer_hooks.update.guarded_step": "GuardedStep NonFiniteGradientError clip_gradients",
    "trainer_hooks.update.micro_batches": (
        "UpdateSettings accumulate_gradients compute_logprobs split_micro_batches update_policy"
    ),
    "trainer_hooks.update.reference": "ReferencePolicy",
    "trainer_hooks.update.settings": "ReferenceSettings",
    "trainer_hooks.weight_sync": (
        "CheckpointWeightSync CollectiveWeightSync InProcessWeightSync SharedMemoryWeightSync "
        "WeightSync full_tensors join_push merged_tensors"
    ),
}
_load, __all__ = _lazy_names(__name__, _HOMES)

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
        return _load(name)
    module, new_name = _RENAMED[name]
    _warnings.warn(
        f"trainer_hooks.{name} is now {module}.{new_name}; the old name goes in version 0.14",
        DeprecationWarning,
        stacklevel=2,
    )
    return getattr(_import_module(module), new_name)


def __dir__() -> list[str]:
    return __all__
