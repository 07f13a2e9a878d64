"""Rewards of the samples of one prompt."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rollout.text import Tokenizer
from trainer_hooks.prompt_ledger import PromptItem
from trainer_hooks.rewards.runner import RewardRunner
from trainer_hooks.rollouts import Rollout


async def score_rollouts(
    reward: RewardRunner,
    item: PromptItem,
    rollouts: Sequence[Rollout],
    tokenizer: Tokenizer | None,
) -> list[float]:
    """One reward per rollout; NaN for those that failed, which the function never sees.

    Completions are texts, or token ids without a tokenizer. A completion of several turns includes
    tool output. Raises what RewardRunner.score_or_raise raises.
    """
    valid = [i for i, rollout in enumerate(rollouts) if rollout.succeeded()]
    rewards = [math.nan] * len(rollouts)
    if valid:
        scores = await reward.score_or_raise(
            [item.prompt] * len(valid),
            [completion_of(rollouts[i], tokenizer) for i in valid],
            [rollouts[i].completion_ids for i in valid],
            {name: [value] * len(valid) for name, value in item.columns.items()},
        )
        for i, score in zip(valid, scores, strict=True):
            rewards[i] = score
    return rewards


def completion_of(rollout: Rollout, tokenizer: Tokenizer | None) -> str | list[int]:
    """The text of all turns with tool output; token ids without a tokenizer."""
    if len(rollout.requests) == 1 and rollout.requests[0].generated_text is not None:
        return rollout.requests[0].generated_text
    ids = rollout.completion_ids
    return ids if tokenizer is None else tokenizer.decode(ids)
