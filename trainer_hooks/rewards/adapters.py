"""Adapters that combine several reward functions, or take a function in TRL's or verl's convention.

Used by users' training loops and `trainer_hooks.train.task`, which pass the result to a
RewardRunner. `trainer_hooks.rewards.scoring` and `trainer_hooks.environments.verifiers` make
WeightedReward. `trainer_hooks.producer.batches` and `trainer_hooks.evaluation` use
`reward_metrics`.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean, stdev
from typing import Any

from rollout.errors import ConfigError
from trainer_hooks.rewards.calling import (
    RewardFunction,
    call_reward,
    is_async,
    name_of,
    numbers_of,
)
from trainer_hooks.rewards.failures import FailureLog


class WeightedReward(float):
    """A weighted sum of rewards that keeps its terms."""

    terms: Mapping[str, float]  # unweighted result of each function, by its name

    def __new__(cls, value: float, terms: Mapping[str, float]) -> WeightedReward:
        reward = super().__new__(cls, value)
        reward.terms = terms
        return reward

    def __reduce__(self) -> tuple[type, tuple[float, Mapping[str, float]]]:
        return WeightedReward, (float(self), self.terms)


class WeightedRewards:
    """A reward function that returns the weighted sum of several functions' results, as in TRL.

    A None or NaN of one function is left out of a sample's sum. The sum is None if all functions
    return None or NaN. Each function gets the columns that its signature names. Async functions are
    called last and awaited together. Each reward is a WeightedReward.
    `reward_weights`: one per function. None means 1 each.
    `names`: names of the terms. None means the functions' names.
    Raises ConfigError without a function, and unless each function has one weight and a distinct
    name.
    """

    def __init__(
        self,
        reward_funcs: Sequence[RewardFunction],
        reward_weights: Sequence[float] | None = None,
        names: Sequence[str] | None = None,
    ) -> None:
        if reward_weights is None:
            reward_weights = [1.0] * len(reward_funcs)
        if names is None:
            names = [name_of(function) for function in reward_funcs]
            names = [f"{n}_{i}" if names.count(n) > 1 else n for i, n in enumerate(names)]
        if not reward_funcs or not len(reward_weights) == len(set(names)) == len(reward_funcs):
            raise ConfigError(
                f"{len(reward_weights)} reward_weights for {len(reward_funcs)} reward_funcs named "
                f"{list(names)}; give at least one function, with one weight and one distinct "
                "name each"
            )
        self._functions, self._weights = list(reward_funcs), list(reward_weights)
        self._names = list(names)
        self.__name__ = " + ".join(names)  # in errors and the log

    @property
    def awaits(self) -> bool:
        """Whether a function is declared async, so that calls return an awaitable."""
        return any(is_async(function) for function in self._functions)

    def __call__(
        self,
        prompts: Sequence[Any],
        completions: Sequence[Any],
        completion_ids: Sequence[Sequence[int]],
        **columns: Sequence[Any],
    ) -> Any:
        """Return one WeightedReward or None per completion, possibly as an awaitable.

        The result is an awaitable if a function returns an awaitable. Raises ConfigError unless
        each function returns one number per completion.
        """
        results: list[Any] = [None] * len(self._functions)
        # Async functions last: an error of another function then leaves no coroutine behind.
        for i in sorted(range(len(results)), key=lambda i: is_async(self._functions[i])):
            given = prompts, completions, completion_ids, columns
            results[i] = call_reward(self._functions[i], *given)
        waiting = [i for i, result in enumerate(results) if hasattr(result, "__await__")]
        if waiting:
            return self._when_awaited(results, waiting, len(completions))
        return self._sums(results, len(completions))

    async def _when_awaited(
        self, results: list[Any], waiting: list[int], num_completions: int
    ) -> list[WeightedReward | None]:
        arrived = await asyncio.gather(*(results[i] for i in waiting))
        for i, result in zip(waiting, arrived, strict=True):
            results[i] = result
        return self._sums(results, num_completions)

    def _sums(self, results: list[Any], num_completions: int) -> list[WeightedReward | None]:
        totals = [0.0] * num_completions
        terms: list[dict[str, float]] = [{} for _ in range(num_completions)]
        parts = zip(self._names, self._functions, self._weights, results, strict=True)
        for name, function, weight, rewards in parts:
            for i, reward in enumerate(numbers_of(function, rewards, num_completions)):
                if not math.isnan(reward):
                    totals[i] += weight * reward
                    terms[i][name] = reward
        pairs = zip(totals, terms, strict=True)
        return [WeightedReward(total, own) if own else None for total, own in pairs]


def reward_metrics(rewards: Sequence[float]) -> dict[str, float]:
    """Return `rewards/<name>/mean` and `rewards/<name>/std` of each term, as in TRL.

    A mean covers the rewards that have the term. The deviation of a single reward is 0. Rewards
    without terms are ignored.
    """
    values: dict[str, list[float]] = {}
    for reward in rewards:
        for name, value in getattr(reward, "terms", {}).items():
            values.setdefault(name, []).append(value)
    metrics = {}
    for name, own in values.items():
        metrics[f"rewards/{name}/mean"] = fmean(own)
        metrics[f"rewards/{name}/std"] = stdev(own) if len(own) > 1 else 0.0
    return metrics


class ConversationalReward:
    """Calls a reward function with chat messages, as TRL does for conversational data.

    The function gets [{"role": "assistant", "content": text}] for each completion. For each prompt
    it gets the row's column `messages`, or one user message if there is no such column. All columns
    are passed on.
    """

    def __init__(self, reward_function: RewardFunction) -> None:
        self._function = reward_function
        self.__name__ = name_of(reward_function)

    def __call__(
        self,
        prompts: Sequence[Any],
        completions: Sequence[Any],
        completion_ids: Sequence[Sequence[int]],
        **columns: Sequence[Any],
    ) -> Any:
        """Return the function's result for the chat messages."""
        chats = columns.get("messages") or [[{"role": "user", "content": p}] for p in prompts]
        answers = [[{"role": "assistant", "content": text}] for text in completions]
        return call_reward(self._function, chats, answers, completion_ids, columns)


class VerlReward:
    """A reward function made from verl's `compute_score`.

    A VerlReward calls `compute_score(data_source, solution_str, ground_truth, extra_info)`, which
    returns a number, or a mapping with "score". The columns are named as in verl: data_source,
    extra_info, and ground_truth, or reward_model with "ground_truth" in it. Each call gets one
    sample. The sample's score is None if the call returns None, raises or returns no number. Errors
    are logged. If all samples fail with an error, the first error is raised.
    """

    def __init__(self, compute_score: Callable[..., Any]) -> None:
        self._compute_score = compute_score
        self._failures = FailureLog(f"reward function {name_of(compute_score)}")

    def __call__(
        self,
        completions: Sequence[str],
        data_source: Sequence[Any] | None = None,
        reward_model: Sequence[Mapping[str, Any]] | None = None,
        ground_truth: Sequence[Any] | None = None,
        extra_info: Sequence[Any] | None = None,
    ) -> list[float | None]:
        """Return one score or None per completion. Raises ConfigError without a ground truth."""
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
