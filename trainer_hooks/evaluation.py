"""evaluate: measures the mean reward of the current weights on a set of prompts.

Used by users' training loops, `trainer_hooks.train.task` and `trainer_hooks.train.warm_up`.
`evaluate` submits requests to the engines and calls the reward function. It changes no weights and
writes no files.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rollout.errors import ConfigError
from rollout.sampling_params import SamplingParams
from rollout.step.seeds import mix_seed, system_seed
from rollout.text import Tokenizer
from trainer_hooks.producer.groups import (
    GeneratesAsync,
    RolloutFunction,
    sample_rollouts,
    tokenizer_for,
)
from trainer_hooks.prompts.ledger import PromptItem, PromptLedger, PromptRows
from trainer_hooks.rewards import (
    RewardFailed,
    RewardRunner,
    as_runner,
    reward_metrics,
    score_rollouts,
)
from trainer_hooks.rewards.calling import RewardFunction
from trainer_hooks.rewards.scoring import completion_of
from trainer_hooks.rollouts import Rollout

GREEDY = SamplingParams(temperature=0.0)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Scored:
    item: PromptItem
    rollouts: Sequence[Rollout]
    rewards: Sequence[float]
    answers: Sequence[Hashable | None] | None

    @property
    def valid_rewards(self) -> list[float]:
        return [reward for reward in self.rewards if not math.isnan(reward)]


async def evaluate(
    llm: GeneratesAsync,
    prompts: PromptRows | Iterable[Any],
    reward_fn: RewardFunction | RewardRunner | None,
    sampling_params: SamplingParams = GREEDY,
    n: int = 1,
    *,
    rollout_fn: RolloutFunction | None = None,
    tokenizer: Any | None = None,
    max_concurrent: int = 64,
    timeout_s: float | None = None,
    prefix: str = "eval",
    pass_at: Sequence[int] = (),
    success_reward: float = 1.0,
    answer_fn: Callable[[str | list[int]], Hashable | None] | None = None,
    on_finished: Callable[[], None] = lambda: None,
) -> dict[str, float]:
    """Sample and score each prompt `n` times. Returns metrics named `<prefix>/<metric>`.

    The call is allowed while a producer works and weights are updated. Its requests share the
    engines and continue after pauses.
    The metric `reward` is the mean over all samples that did not fail. `reward_best_of_n` is the
    mean over prompts of their best sample's reward. `rewards/<term>` is the mean of a term of
    WeightedRewards. `version_min` and `version_max` are the lowest and highest version that sampled
    a token, -1 if nothing was sampled. Rows with the column `data_source`, as verl has them, also
    give metrics of each source, named `<prefix>/<source>/<metric>`, except the versions and
    `seconds`.
    `reward_fn`, `rollout_fn`: as for AsyncRolloutProducer.
    `sampling_params`: with a seed, each prompt gets its own seed derived from it.
    `tokenizer`: decodes completions for `reward_fn`. None selects the tokenizer of `llm`, if any.
    `max_concurrent`: number of prompts that are sampled at a time.
    `pass_at`: values of k. `pass@k` is the mean chance that one of k samples of a prompt has a
    reward of at least `success_reward`.
    `answer_fn`: returns the answer in a completion, or None. `maj@<n>` is the mean reward of the
    most frequent answer of each prompt.
    `on_finished`: called at the end of each sample.
    Raises ConfigError for prompts that PromptLedger refuses, for `n` or `max_concurrent` below 1
    and for a k that is not from 1 to `n`. Raises RewardFunctionError for a reward function that has
    never succeeded. Raises TimeoutError after `timeout_s` seconds. After an error all requests are
    aborted.
    """
    loop = asyncio.get_running_loop()
    _check_counts(n, max_concurrent, pass_at)
    start_s, items = loop.time(), _items(prompts)
    (reward, owns_reward), seed = as_runner(reward_fn), _seed_of(sampling_params, rollout_fn)
    text, places = tokenizer_for(llm, tokenizer), asyncio.Semaphore(max_concurrent)

    async def score(index: int, item: PromptItem) -> _Scored:
        params = _params_of_prompt(sampling_params, seed, index)
        async with places:
            rollouts = await sample_rollouts(llm, item, params, n, rollout_fn, text, on_finished)
        answers = answer_fn and [answer_fn(completion_of(rollout, text)) for rollout in rollouts]
        rewards = await _rewards_or_nan(reward, item, rollouts, text)
        return _Scored(item=item, rollouts=rollouts, rewards=rewards, answers=answers)

    tasks = [asyncio.ensure_future(score(i, item)) for i, item in enumerate(items)]
    try:
        scored = await asyncio.wait_for(asyncio.gather(*tasks), timeout_s)
    except asyncio.TimeoutError as error:  # not the builtin TimeoutError before Python 3.11
        raise TimeoutError(str(error) or f"no end within timeout_s={timeout_s}") from error
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if reward is not None and owns_reward:
            reward.close()
    metrics = _metrics_by_source(scored, pass_at, success_reward)
    metrics |= {**_versions(scored), "seconds": loop.time() - start_s}
    return {f"{prefix}/{name}": float(value) for name, value in metrics.items()}


def _seed_of(params: SamplingParams, rollout_fn: RolloutFunction | None) -> int | None:
    # A RolloutLLM derives the seeds of its turns from the prompt's seed, so it needs one.
    return system_seed() if params.seed is None and rollout_fn is not None else params.seed


def _params_of_prompt(params: SamplingParams, seed: int | None, index: int) -> SamplingParams:
    return params if seed is None else replace(params, seed=mix_seed(seed, index))


def _check_counts(n: int, max_concurrent: int, pass_at: Sequence[int]) -> None:
    if n < 1 or max_concurrent < 1:
        raise ConfigError(f"n={n} and max_concurrent={max_concurrent} must be at least 1")
    if any(not 1 <= k <= n for k in pass_at):
        raise ConfigError(f"pass_at={list(pass_at)} must be from 1 to n={n}")


def _items(prompts: PromptRows | Iterable[Any]) -> list[PromptItem]:
    ledger, items = PromptLedger(prompts, shuffle=False, num_epochs=1), []
    while (ticket := ledger.issue()) is not None:
        items.append(ledger.item(ticket))
    return items


async def _rewards_or_nan(
    reward: RewardRunner | None,
    item: PromptItem,
    rollouts: Sequence[Rollout],
    text: Tokenizer | None,
) -> list[float]:
    try:
        return await score_rollouts(reward, item, rollouts, text)
    except RewardFailed:  # the runner has logged it
        return [math.nan] * len(rollouts)


def _metrics_by_source(
    scored: Sequence[_Scored], pass_at: Sequence[int], success_reward: float
) -> dict[str, float]:
    metrics = _metrics(scored, pass_at, success_reward)
    sources = [each.item.columns.get("data_source") for each in scored]
    for source in dict.fromkeys(sources):
        if source is not None:
            own = [each for each, its in zip(scored, sources, strict=True) if its == source]
            source_metrics = _metrics(own, pass_at, success_reward)
            metrics |= {f"{source}/{name}": value for name, value in source_metrics.items()}
    return metrics


def _metrics(
    scored: Sequence[_Scored], pass_at: Sequence[int], success_reward: float
) -> dict[str, float]:
    rewards = [reward for each in scored for reward in each.valid_rewards]
    rollouts = [rollout for each in scored for rollout in each.rollouts]
    lengths = [rollout.num_generated_tokens for rollout in rollouts]
    mean = _mean(rewards)
    squares = [(reward - mean) ** 2 for reward in rewards]
    metrics = {
        "reward": mean,
        "reward_std": math.sqrt(_mean(squares)) if squares else math.nan,
        "reward_best_of_n": _mean([max(e.valid_rewards) for e in scored if e.valid_rewards]),
        "failed_fraction": 1.0 - len(rewards) / len(rollouts),
        "num_prompts": len(scored),
        "num_samples": len(rollouts),
        "mean_length": _mean(lengths),
        **{
            name.removesuffix("/mean"): value
            for name, value in reward_metrics(rewards).items()
            if name.endswith("/mean")
        },
    }
    for k in pass_at:
        chances = [_pass_at(each.rewards, k, success_reward) for each in scored]
        metrics[f"pass@{k}"] = _mean(chances)
    if all(each.answers is not None for each in scored):
        num_samples = max(len(each.rollouts) for each in scored)
        metrics[f"maj@{num_samples}"] = _mean([_majority_reward(each) for each in scored])
    return metrics


def _versions(scored: Sequence[_Scored]) -> dict[str, float]:
    rollouts = [rollout for each in scored for rollout in each.rollouts]
    versions = [v for rollout in rollouts for v in set(rollout.policy_versions.tolist())]
    return {"version_min": min(versions, default=-1), "version_max": max(versions, default=-1)}


def _pass_at(rewards: Sequence[float], k: int, success_reward: float) -> float:
    """Return 1 - C(n - c, k) / C(n, k) for c successes in n samples. A NaN reward is no success.

    Source: Chen et al. 2021 (Codex), arXiv 2107.03374, eq. 1.
    """
    n, c = len(rewards), sum(reward >= success_reward for reward in rewards)
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)


def _majority_reward(scored: _Scored) -> float:
    """Return the mean reward of the samples with the most frequent answer, without failed samples.

    Returns 0 if no sample has an answer or all samples with that answer failed. The first of
    equally frequent answers counts.
    Source: self-consistency (Wang et al. 2023), arXiv 2203.11171, sec. 2.
    """
    assert scored.answers is not None
    votes = Counter(answer for answer in scored.answers if answer is not None)
    if not votes:
        return 0.0
    chosen, _ = votes.most_common(1)[0]
    pairs = zip(scored.answers, scored.rewards, strict=True)
    rewards = [reward for answer, reward in pairs if answer == chosen and not math.isnan(reward)]
    return _mean(rewards) if rewards else 0.0


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else math.nan
