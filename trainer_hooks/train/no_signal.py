"""step_warnings: explains why a training step taught nothing, and what can help.

Used by `trainer_hooks.train.main`. `trainer_hooks.metrics.step_warnings` lists the kinds of
warnings. All functions are pure.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from rollout.text import Tokenizer
from trainer_hooks.losses.advantages import has_reward_spread
from trainer_hooks.producer import TrainingBatch
from trainer_hooks.producer.groups import ScoredGroup
from trainer_hooks.rewards.scoring import completion_of
from trainer_hooks.train.job import AlgorithmSettings
from trainer_hooks.train.samples import cut_start, one_line

_SEEN_CHARACTERS = _WANTED_CHARACTERS = 40
# Columns that usually hold the right answer, the likeliest first.
_ANSWER_COLUMNS = ("answer", "ground_truth", "solution", "target", "label")
_NO_ANSWERS = ("messages", "data_source", "reward_model")  # columns without an answer


def step_warnings(
    step: int,
    row: Mapping[str, Any],
    batch: TrainingBatch,
    algorithm: AlgorithmSettings,
    tokenizer: Tokenizer | None,
    success_reward: float = 1.0,
) -> dict[str, str]:
    """Return the warnings of a step that taught nothing, by kind, or {} if the step taught
    something.

    `row`: the metrics of the step and of its update.
    `batch`: the step's batch. Each of its groups has a reward.
    `tokenizer`: decodes samples for the texts, as for the reward function.
    `success_reward`: the reward of a good answer. If all samples have it, the warning advises
        harder prompts.
    """
    rollouts = [rollout for group in batch.groups for rollout in group.rollouts]
    found: dict[str, str] = {}
    if not _is_spread(batch, algorithm):
        found["same_scores"] = _same_scores(batch.groups, tokenizer, success_reward)
    if all(each.finish_reason == "length" for each in rollouts):
        found["all_cut"] = (
            f"all {len(rollouts):,} completions were cut by the length limit"
            f"{', so none is trained on' * algorithm.mask_truncated_completions}. One ends with "
            f"{_seen(batch.groups[0], tokenizer)}. Raise algorithm.max_new_tokens="
            f"{algorithm.max_new_tokens}, reward short answers, or check the end token."
        )
    is_masked = "all_cut" in found and algorithm.mask_truncated_completions
    if "same_scores" not in found and not is_masked:
        found |= _without_gradient(row, len(rollouts))
    return {kind: f"step {step:,}: {text}" for kind, text in found.items()}


def _is_spread(batch: TrainingBatch, algorithm: AlgorithmSettings) -> bool:
    """Return whether the rewards differ within a group, or within the batch if the algorithm
    compares the whole batch."""
    is_by_group = (
        algorithm.critic is None and algorithm.advantage_estimator != "reinforce_plus_plus"
    )
    rewards_PG = torch.tensor([list(group.rewards) for group in batch.groups])
    return bool(has_reward_spread(rewards_PG if is_by_group else rewards_PG.view(1, -1)).any())


def _same_scores(
    groups: Sequence[ScoredGroup], tokenizer: Tokenizer | None, success_reward: float
) -> str:
    worst = min(groups, key=lambda group: group.mean_reward)
    low, high = worst.mean_reward, max(group.mean_reward for group in groups)
    level = f"each sample {low:.3f}"
    if f"{low:.3f}" != f"{high:.3f}":
        level = f"{low:.3f} in one, {high:.3f} in another"
        remedy = (
            "Take prompts between these (producer=dynamic_sampling), or raise "
            "algorithm.group_size or algorithm.temperature."
        )
    elif low >= success_reward:
        remedy = "The model has learned these prompts: take harder ones."
    elif low <= 0.0:
        remedy = (
            "Is the reward right? Else take easier prompts, warmup=supervised, or a higher "
            "algorithm.temperature."
        )
    else:
        remedy = (
            "Does the reward tell good from bad? Else raise algorithm.temperature or "
            "algorithm.group_size."
        )
    return (
        f"every group scored the same ({level}): nothing learned. The reward saw "
        f"{_seen(worst, tokenizer)}, the row has {_wanted(worst.item.columns)}. {remedy}"
    )


def _without_gradient(row: Mapping[str, Any], num_rollouts: int) -> dict[str, str]:
    if not row["train/num_tokens"]:
        flat, cut = row["frac_reward_zero_std"], row["completions/clipped_ratio"]
        return {
            "nothing_trained": (
                f"none of the tokens of {num_rollouts:,} rollouts was trained on: {flat:.0%} of "
                f"the groups scored the same, {cut:.0%} of the completions were cut, and "
                f"{row['failed_fraction']:.0%} of the rollouts failed."
            )
        }
    if row["train/skipped_steps"] and "train/grad_norm" not in row:
        return {
            "nothing_trained": (
                f"no optimizer step was made: all {row['train/skipped_steps']} gradients were NaN "
                "or infinite. Look for NaN in rewards and weights, or lower trainer.learning_rate."
            )
        }
    if row.get("train/grad_norm") == 0.0:
        return {
            "zero_gradient": (
                f"the gradient of {row['train/num_tokens']:,} tokens was zero. See whether "
                "train/clip_ratio/region_mean is 1 (lower trainer.learning_rate or the staleness) "
                "and whether the trained parameters are part of the forward pass."
            )
        }
    return {}


def _seen(group: ScoredGroup, tokenizer: Tokenizer | None) -> str:
    """Return the end of the group's first scored completion, as the reward function gets it."""
    pairs = zip(group.rollouts, group.rewards, strict=True)
    rollout = next(rollout for rollout, reward in pairs if not math.isnan(reward))
    completion = completion_of(rollout, tokenizer)
    return f"{cut_start(one_line(str(completion)), _SEEN_CHARACTERS)!r}"


def _wanted(columns: Mapping[str, Any]) -> str:
    """Return the row's answer: its likeliest answer column, or else its first two columns."""
    names = [name for name in _ANSWER_COLUMNS if columns.get(name) is not None][:1]
    names = names or [name for name in columns if name not in _NO_ANSWERS][:2]
    if not names:
        return "no column besides the prompt"
    shown = (f"{name}={_shortened(repr(columns[name]), _WANTED_CHARACTERS)}" for name in names)
    return ", ".join(shown)


def _shortened(text: str, length: int) -> str:
    text = one_line(text)
    return text if len(text) <= length else f"{text[: length - 3]}..."
