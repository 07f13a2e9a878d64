"""score_rollouts: computes the rewards of the samples of one prompt.

Used by `trainer_hooks.producer.groups` and `trainer_hooks.evaluation`. `trainer_hooks.evaluation`
and `trainer_hooks.train.no_signal` use `completion_of`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from rollout.errors import ConfigError
from rollout.generated_text import generated_text
from rollout.text import PromptIds, Tokenizer
from trainer_hooks.prompts.ledger import PromptItem
from trainer_hooks.rewards.adapters import WeightedReward
from trainer_hooks.rewards.runner import RewardRunner
from trainer_hooks.rollouts import Rollout


async def score_rollouts(
    reward: RewardRunner | None,
    item: PromptItem,
    rollouts: Sequence[Rollout],
    tokenizer: Tokenizer | None,
) -> list[float]:
    """Return one reward per rollout. Failed rollouts get NaN without a call of the function.

    A reward is the rollout's own reward, the function's result, or the sum of both.
    `reward`: runner of the function, or None if the rollouts have rewards of their own.
    The function gets the completions of `completion_of`, and as columns `is_truncated`, the
    prompt's columns and the rollouts' columns. If a rollout lacks a column that another rollout
    has, the value is the prompt's, or None.
    Raises ConfigError for a rollout without any reward, and for a term that both the function and
    the rollout have. Raises the errors of RewardRunner.score_or_raise.
    """
    rewards = [math.nan] * len(rollouts)
    valid = [i for i, each in enumerate(rollouts) if each.succeeded() and not _is_nan(each.reward)]
    if not valid:
        return rewards
    own = [rollouts[i] for i in valid]
    scores: Sequence[float | None] = [None] * len(own)
    if reward is not None:
        scores = await reward.score_or_raise(
            [item.prompt] * len(own),
            [completion_of(rollout, tokenizer) for rollout in own],
            [rollout.completion_ids for rollout in own],
            _columns(item, own),
        )
    for i, rollout, score in zip(valid, own, scores, strict=True):
        rewards[i] = _total(rollout, score)
    return rewards


def _is_nan(reward: float | None) -> bool:
    return reward is not None and math.isnan(reward)


def _columns(item: PromptItem, rollouts: Sequence[Rollout]) -> dict[str, list[Any]]:
    columns: dict[str, list[Any]] = {
        "is_truncated": [each.finish_reason == "length" for each in rollouts]
    }
    columns |= {name: [value] * len(rollouts) for name, value in item.columns.items()}
    for name in dict.fromkeys(name for rollout in rollouts for name in rollout.columns):
        shared = item.columns.get(name)
        columns[name] = [rollout.columns.get(name, shared) for rollout in rollouts]
    return columns


def _total(rollout: Rollout, score: float | None) -> float:
    if score is None and rollout.reward is None:
        raise ConfigError(
            "a rollout has no reward: there is no reward function, and the rollout_fn returned a "
            "Rollout with reward=None; give one of them"
        )
    if score is not None and rollout.reward is None and not rollout.reward_terms:
        return score
    terms: dict[str, float] = dict(getattr(score, "terms", {}))
    if clash := sorted(set(terms) & set(rollout.reward_terms)):
        raise ConfigError(
            f"the reward terms {clash} come from the reward function and from the rollout; rename "
            "those of one"
        )
    terms |= rollout.reward_terms
    total = (score or 0.0) + (rollout.reward or 0.0)
    return WeightedReward(total, terms) if terms else total


def completion_of(rollout: Rollout, tokenizer: Tokenizer | None) -> str | list[int]:
    """Return the completion of all turns, with tool output, as text or token ids.

    The completion is text if there is a tokenizer, or if the rollout is one request that has its
    text.
    """
    if len(rollout.requests) == 1 and rollout.requests[0].generated_text is not None:
        return rollout.requests[0].generated_text
    ids = rollout.completion_ids
    return ids if tokenizer is None else generated_text(tokenizer, ids, _prompt_of(rollout))


def _prompt_of(rollout: Rollout) -> PromptIds:
    return rollout.requests[0].prompt_tokens if rollout.requests else ()
