"""Calling a reward function: the arguments that its signature names, and what it returns."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rollout.errors import ConfigError

RewardFunction = Callable[..., Any]
_STANDARD = ("prompts", "completions", "completion_ids")
_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def arguments_for(
    reward_fn: RewardFunction,
    prompts: Sequence[Any],
    completions: Sequence[Any],
    completion_ids: Sequence[Sequence[int]],
    columns: Mapping[str, Sequence[Any]],
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of `reward_fn(prompts, completions, completion_ids, ...)`, by kind.

    They go by name where the function names any of the three, in this order otherwise. Of the
    columns it gets those that it names, or all with `**columns`.
    Raises ConfigError if it needs a column that the prompts do not have.
    """
    standard = dict(zip(_STANDARD, (prompts, completions, completion_ids), strict=True))
    try:
        parameters = list(inspect.signature(reward_fn).parameters.values())
    except ValueError:  # a builtin
        return tuple(standard.values()), dict(columns)
    takes_all = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters)
    positional: tuple[Any, ...] = ()
    if not any(p.name in standard for p in parameters):
        places = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        if len(places) >= len(standard):
            positional, standard = tuple(standard.values()), {}
            parameters = [p for p in parameters if p not in places[:3]]
    offered = {**columns, **standard}
    named = {p.name for p in parameters if p.kind in _BY_NAME}
    missing = [
        p.name
        for p in parameters
        if p.kind in _BY_NAME and p.default is p.empty and p.name not in offered
    ]
    if missing:
        raise ConfigError(
            f"the reward function {name_of(reward_fn)} needs {', '.join(missing)}; the prompts' "
            f"columns are: {', '.join(sorted(columns)) or 'none'}"
        )
    return positional, {k: v for k, v in offered.items() if takes_all or k in named}


def call_reward(
    reward_fn: RewardFunction,
    prompts: Sequence[Any],
    completions: Sequence[Any],
    completion_ids: Sequence[Sequence[int]],
    columns: Mapping[str, Sequence[Any]],
) -> Any:
    """Call the function with the arguments that it names; return what `rewards_of` returns."""
    args, named = arguments_for(reward_fn, prompts, completions, completion_ids, columns)
    return rewards_of(reward_fn, args, named)


def rewards_of(reward_fn: RewardFunction, args: tuple[Any, ...], named: Mapping[str, Any]) -> Any:
    """Return what the function returns for these arguments, as a list if it can be iterated.

    A generator runs here, so that the result can be sent to another process.
    """
    result = reward_fn(*args, **named)
    try:
        rewards = iter(result)
    except TypeError:  # an awaitable, or a value that numbers_of refuses
        return result
    return list(rewards)


def numbers_of(reward_fn: RewardFunction, rewards: Any, num_completions: int) -> list[float]:
    """Return the rewards that the function returned as numbers; NaN for None.

    A float of another class stays what it is: a WeightedReward keeps its terms.
    Raises ConfigError if they are not one number per completion.
    """
    try:
        numbers = [
            reward if isinstance(reward, float) else math.nan if reward is None else float(reward)
            for reward in rewards
        ]
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{name_of(reward_fn)} returned {rewards!r}: {error}") from error
    if len(numbers) != num_completions:
        raise ConfigError(
            f"{name_of(reward_fn)} returned {len(numbers)} rewards for {num_completions} "
            "completions"
        )
    return numbers


def name_of(reward_fn: RewardFunction) -> str:
    """Return the name of the function in messages."""
    return str(getattr(reward_fn, "__name__", type(reward_fn).__name__))


def is_async(reward_fn: RewardFunction) -> bool:
    """Return whether calls of the function are to be awaited."""
    call = getattr(reward_fn, "__call__", None)  # noqa: B004 - its kind is asked for
    return inspect.iscoroutinefunction(reward_fn) or inspect.iscoroutinefunction(call)
