"""evaluate: the reward of the present weights on a set of prompts."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rollout.errors import ConfigError
from rollout.sampling_params import SamplingParams
from rollout.step.seeds import mix_seed
from trainer_hooks.producer.groups import GeneratesAsync, encoded_for, tokenizer_for
from trainer_hooks.prompt_ledger import PromptItem, PromptLedger, PromptRows
from trainer_hooks.rewards import RewardFailed, RewardRunner, as_runner, score_rollouts
from trainer_hooks.rewards.calling import RewardFunction
from trainer_hooks.rollouts import Rollout, as_rollout

GREEDY = SamplingParams(temperature=0.0)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Scored:
    rollouts: Sequence[Rollout]
    rewards: Sequence[float]


async def evaluate(
    llm: GeneratesAsync,
    prompts: PromptRows | Iterable[Any],
    reward_fn: RewardFunction | RewardRunner,
    sampling_params: SamplingParams = GREEDY,
    n: int = 1,
    *,
    tokenizer: Any | None = None,
    max_concurrent: int = 64,
    timeout_s: float | None = None,
    prefix: str = "eval",
) -> dict[str, float]:
    """Sample and score each prompt `n` times; flat metrics under `prefix`.

    It may run while a producer works and weights are updated: its requests share the engines and
    continue after pauses. `version_min` and `version_max` are the versions that sampled its tokens;
    they are equal if the weights did not change meanwhile. `reward`: mean over all samples that did
    not fail. `reward_best_of_n`: mean over prompts of the best sample. `sampling_params` with a
    seed give each prompt a seed of its own.
    Raises ConfigError for prompts that PromptLedger refuses, RewardFunctionError for a reward
    function that never succeeds, TimeoutError after `timeout_s` seconds, with everything aborted.
    """
    loop = asyncio.get_running_loop()
    if n < 1 or max_concurrent < 1:
        raise ConfigError(f"n={n} and max_concurrent={max_concurrent} must be at least 1")
    ledger, start_s = PromptLedger(prompts, shuffle=False, num_epochs=1), loop.time()
    items = []
    while (ticket := ledger.issue()) is not None:
        items.append(ledger.item(ticket))
    reward, owns_reward = as_runner(reward_fn)
    text = tokenizer_for(llm, tokenizer)
    places = asyncio.Semaphore(max_concurrent)

    async def score(index: int, item: PromptItem) -> _Scored:
        params = sampling_params
        if params.seed is not None:
            params = replace(params, seed=mix_seed(params.seed, index))
        prompt = encoded_for(llm, item.prompt, text)
        async with places:
            requests = await llm.generate(prompt, params, n)
        rollouts = [as_rollout(r) for r in (requests if isinstance(requests, list) else [requests])]
        try:
            rewards = await score_rollouts(reward, item, rollouts, text)
        except RewardFailed:  # the runner has logged it
            rewards = [math.nan] * len(rollouts)
        return _Scored(rollouts=rollouts, rewards=rewards)

    tasks = [asyncio.ensure_future(score(i, item)) for i, item in enumerate(items)]
    try:
        scored = await asyncio.wait_for(asyncio.gather(*tasks), timeout_s)
    except asyncio.TimeoutError as error:  # before Python 3.11 not the builtin one
        raise TimeoutError(str(error) or f"no end within timeout_s={timeout_s}") from error
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if owns_reward:
            reward.close()
    return _metrics(scored, loop.time() - start_s, prefix)


def _metrics(scored: Sequence[_Scored], seconds: float, prefix: str) -> dict[str, float]:
    valid = [[r for r in each.rewards if not math.isnan(r)] for each in scored]
    rewards = [reward for each in valid for reward in each]
    rollouts = [rollout for each in scored for rollout in each.rollouts]
    lengths = [rollout.num_generated_tokens for rollout in rollouts]
    versions = [v for rollout in rollouts for v in set(rollout.policy_versions.tolist())]
    mean = sum(rewards) / len(rewards) if rewards else math.nan
    squares = [(reward - mean) ** 2 for reward in rewards]
    best = [max(each) for each in valid if each]
    metrics = {
        "reward": mean,
        "reward_std": math.sqrt(sum(squares) / len(squares)) if squares else math.nan,
        "reward_best_of_n": sum(best) / len(best) if best else math.nan,
        "failed_fraction": 1.0 - len(rewards) / len(rollouts),
        "num_prompts": len(scored),
        "num_samples": len(rollouts),
        "mean_length": sum(lengths) / len(lengths),
        "version_min": min(versions, default=-1),
        "version_max": max(versions, default=-1),
        "seconds": seconds,
    }
    return {f"{prefix}/{name}": float(value) for name, value in metrics.items()}
