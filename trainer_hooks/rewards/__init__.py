"""Reward functions: ready-made ones, and what calls, combines and adapts users' functions.

Used by users' training loops, `trainer_hooks.train.task`, `trainer_hooks.producer`,
`trainer_hooks.evaluation` and examples/train_trl.py.
"""

from rollout.lazy_names import lazy_names as _lazy_names

# Module -> its names in this package. __init__.pyi lists the same names.
_HOMES = {
    "trainer_hooks.rewards.adapters": (
        "ConversationalReward VerlReward WeightedReward WeightedRewards reward_metrics"
    ),
    "trainer_hooks.rewards.failures": "RewardFailed RewardFunctionError",
    "trainer_hooks.rewards.ready_made": "FormatReward LengthReward reasoning_gym_reward",
    "trainer_hooks.rewards.reward_model": "BatchedReward RewardModel",
    "trainer_hooks.rewards.runner": "RewardRunner as_runner",
    "trainer_hooks.rewards.scoring": "score_rollouts",
    "trainer_hooks.rewards.text_match": "NumberReward edit_similarity_reward exact_match_reward",
}
__getattr__, __all__ = _lazy_names(__name__, _HOMES)


def __dir__() -> list[str]:
    return __all__
