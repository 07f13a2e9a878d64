"""Calls a reward function with the arguments that its signature names, and checks its result.

Used by the modules `adapters`, `process`, `processes` and `runner` of `trainer_hooks.rewards`.
`trainer_hooks.producer.producer`, `trainer_hooks.evaluation` and
`trainer_hooks.environments.agent_rollouts` use the type RewardFunction. The functions keep no
state.
"""

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
    """Return the positional and named arguments for a call of `reward_fn`.

    Prompts, completions and completion ids are passed by position if the function names none of
    them and has at least three positional parameters. Otherwise they are passed by name, if the
    function names them. A function with `**columns` gets all columns. Another function gets only
    the columns that it names.
    Raises ConfigError if the function needs a column that the prompts do not have.
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
            f"the prompts have no column for the parameters {', '.join(missing)} of the reward "
            f"function {name_of(reward_fn)}; their columns are: "
            f"{', '.join(sorted(columns)) or 'none'}. Add the columns, or give the parameters "
            "defaults"
        )
    return positional, {k: v for k, v in offered.items() if takes_all or k in named}


def call_reward(
    reward_fn: RewardFunction,
    prompts: Sequence[Any],
    completions: Sequence[Any],
    completion_ids: Sequence[Sequence[int]],
    columns: Mapping[str, Sequence[Any]],
) -> Any:
    """Call the function with the arguments that it names. Returns the result of `rewards_of`.

    Raises ConfigError if the function needs a column that the prompts do not have.
    """
    args, named = arguments_for(reward_fn, prompts, completions, completion_ids, columns)
    return rewards_of(reward_fn, args, named)


def rewards_of(reward_fn: RewardFunction, args: tuple[Any, ...], named: Mapping[str, Any]) -> Any:
    """Call the function. Returns its result, as a list if it is iterable."""
    result = reward_fn(*args, **named)
    try:
        rewards = iter(result)
    except TypeError:  # an awaitable, or a value that numbers_of refuses
        return result
    return list(rewards)  # a generator runs here: it could not be sent to another process


def numbers_of(reward_fn: RewardFunction, rewards: Any, num_completions: int) -> list[float]:
    """Return the function's rewards as floats, with NaN for None. A WeightedReward keeps its terms.

    Raises ConfigError unless there is one number per completion.
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
    return str(getattr(reward_fn, "__name__", type(reward_fn).__name__))


def is_async(reward_fn: RewardFunction) -> bool:
    """Return whether the function, or its `__call__`, is declared `async def`.

    A function declared otherwise can still return an awaitable. WeightedRewards is an example.
    """
    call = getattr(reward_fn, "__call__", None)  # noqa: B004 - its kind is asked for
    return inspect.iscoroutinefunction(reward_fn) or inspect.iscoroutinefunction(call)
