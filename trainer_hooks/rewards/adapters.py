"""Adapters for reward functions of other conventions."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rollout.errors import ConfigError
from trainer_hooks.rewards.calling import (
    RewardFunction,
    arguments_for,
    is_async,
    name_of,
    numbers_of,
    rewards_of,
)
from trainer_hooks.rewards.failures import FailureLog


class WeightedRewards:
    """Several reward functions as one: the weighted sum of what they give, in TRL's convention.

    A None or NaN of one function is left out of a sample's sum; if all give none, so does this.
    The functions are called one after another; each gets the columns that it names. They must not
    be async, so that the sum can be computed in a process of its own.
    """

    def __init__(
        self,
        reward_funcs: Sequence[RewardFunction],
        reward_weights: Sequence[float] | None = None,
    ) -> None:
        """Raises ConfigError unless there is one weight per function, and for async ones."""
        if reward_weights is None:
            reward_weights = [1.0] * len(reward_funcs)
        if not reward_funcs or len(reward_weights) != len(reward_funcs):
            raise ConfigError(
                f"{len(reward_weights)} reward_weights for {len(reward_funcs)} reward_funcs; one "
                "for each, and at least one, is wanted"
            )
        waiting = [name_of(function) for function in reward_funcs if is_async(function)]
        if waiting:
            raise ConfigError(f"{', '.join(waiting)} are async; await them in one async function")
        self._functions, self._weights = list(reward_funcs), list(reward_weights)

    def __call__(
        self,
        prompts: Sequence[Any],
        completions: Sequence[Any],
        completion_ids: Sequence[Sequence[int]],
        **columns: Sequence[Any],
    ) -> list[float | None]:
        """One sum per completion. Raises ConfigError unless each function gives as many numbers."""
        totals: list[float | None] = [None] * len(completions)
        for function, weight in zip(self._functions, self._weights, strict=True):
            args, named = arguments_for(function, prompts, completions, completion_ids, columns)
            rewards = rewards_of(function, args, named)
            for i, reward in enumerate(numbers_of(function, rewards, len(completions))):
                if not math.isnan(reward):
                    totals[i] = (totals[i] or 0.0) + weight * reward
        return totals


class VerlReward:
    """A `compute_score(data_source, solution_str, ground_truth, extra_info)` in verl's convention.

    It returns a number, or a mapping with "score". The columns are those of verl's rows:
    data_source, extra_info, and reward_model with "ground_truth" in it (or ground_truth itself).
    A sample whose call raises or gives no number has no reward, and the error is logged; the others
    keep theirs. If it raises for every sample, so does this.
    """

    def __init__(self, compute_score: Callable[..., Any]) -> None:
        self._compute_score = compute_score
        self._failures = FailureLog(name_of(compute_score))

    def __call__(
        self,
        completions: Sequence[str],
        data_source: Sequence[Any] | None = None,
        reward_model: Sequence[Mapping[str, Any]] | None = None,
        ground_truth: Sequence[Any] | None = None,
        extra_info: Sequence[Any] | None = None,
    ) -> list[float | None]:
        """One score per completion. Raises ConfigError without a ground truth."""
        if ground_truth is None:
            if reward_model is None:
                raise ConfigError("verl's rewards need a column ground_truth or reward_model")
            ground_truth = [model["ground_truth"] for model in reward_model]
        nothing = [None] * len(completions)
        sources, infos = data_source or nothing, extra_info or nothing
        scores: list[float | None] = []
        errors: list[Exception] = []
        for sample in zip(sources, completions, ground_truth, infos, strict=True):
            try:
                scores.append(self._score(*sample))
            except Exception as error:  # the user's function may raise anything
                scores.append(None)
                errors.append(error)
        if errors and len(errors) == len(scores):
            raise errors[0]
        for failure in errors:
            self._failures.add(failure)
        return scores

    def _score(self, source: Any, solution: str, truth: Any, info: Any) -> float | None:
        score = self._compute_score(
            data_source=source, solution_str=solution, ground_truth=truth, extra_info=info
        )
        score = score["score"] if isinstance(score, Mapping) else score
        return None if score is None else float(score)
