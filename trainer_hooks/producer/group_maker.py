"""GroupMaker: from one prompt to its samples and their rewards."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from rollout.requests import DynamicInferenceRequest
from rollout.sampling_params import SamplingParams
from rollout.step.seeds import mix_seed
from rollout.text import Tokenizer
from trainer_hooks.producer.group import ScoredGroup
from trainer_hooks.producer.scoped_llm import GeneratesAsync, ScopedLLM, encoded_for
from trainer_hooks.prompt_ledger import PromptItem, PromptTicket
from trainer_hooks.rewards import RewardFailed, RewardRunner, score_rollouts
from trainer_hooks.rollouts import Rollout, as_rollout

Turns = Rollout | DynamicInferenceRequest | Sequence[DynamicInferenceRequest]
RolloutFunction = Callable[[ScopedLLM, Any], Awaitable[Turns]]
Result = TypeVar("Result")


class GroupMaker:
    """Generates `group_size` samples of a prompt, scores them, and tries again if too many failed.

    A score that fails is tried again by the runner, with the same samples; a prompt whose score
    fails to the end is given up without another generation.
    Tokens do not depend on when a group is made: its seed is mix_seed(seed, epoch, prompt index,
    attempt), and `generate` mixes the sample's index in.
    """

    def __init__(
        self,
        llm: GeneratesAsync,
        reward: RewardRunner,
        *,
        group_size: int,
        sampling_params: SamplingParams,
        seed: int,
        rollout_fn: RolloutFunction | None,
        tokenizer: Tokenizer | None,
        min_valid_samples: int,
        max_attempts: int,
    ) -> None:
        self._llm, self._reward = llm, reward
        self._group_size, self._params, self._seed = group_size, sampling_params, seed
        self._rollout_fn, self._tokenizer = rollout_fn, tokenizer
        self._min_valid_samples, self._max_attempts = min_valid_samples, max_attempts

    @property
    def last_reward_error(self) -> BaseException | None:
        """Why the reward function failed last."""
        return self._reward.last_error

    async def make(
        self, ticket: PromptTicket, item: PromptItem, count: Callable[[str], None]
    ) -> ScoredGroup | None:
        """The group; None if no attempt had enough valid samples, or their score failed.

        `count` is called with "retried" for each attempt after the first, and with "reward_failed".
        Raises what generation raises, and RewardFunctionError.
        """
        for attempt in range(self._max_attempts):
            if attempt:
                count("retried")
            try:
                group = await self._attempt(ticket, item, attempt)
            except RewardFailed:  # the runner has logged it
                count("reward_failed")
                return None
            if len(group.valid_rewards) >= self._min_valid_samples:
                return group
        return None

    async def _attempt(self, ticket: PromptTicket, item: PromptItem, attempt: int) -> ScoredGroup:
        loop = asyncio.get_running_loop()
        seed = mix_seed(self._seed, ticket.epoch, ticket.index, attempt)
        start_s = loop.time()
        rollouts = await self._generate(item, replace(self._params, seed=seed))
        generated_s = loop.time()
        rewards = await score_rollouts(self._reward, item, rollouts, self._tokenizer)
        return ScoredGroup(
            ticket=ticket,
            item=item,
            rollouts=rollouts,
            rewards=rewards,
            generate_s=generated_s - start_s,
            reward_s=loop.time() - generated_s,
        )

    async def _generate(self, item: PromptItem, params: SamplingParams) -> list[Rollout]:
        prompt = encoded_for(self._llm, item.prompt, self._tokenizer)
        if self._rollout_fn is not None:
            samples = [self._run_turns(prompt, item, params, i) for i in range(self._group_size)]
            return await _all_or_none(samples)
        requests = await self._llm.generate(prompt, params, self._group_size)
        # One request comes bare where there is one sample.
        return [as_rollout(r) for r in (requests if isinstance(requests, list) else [requests])]

    async def _run_turns(
        self, prompt: Any, item: PromptItem, params: SamplingParams, sample_index: int
    ) -> Rollout:
        assert self._rollout_fn is not None
        scoped = ScopedLLM(self._llm, params, item, sample_index, self._tokenizer)
        turns = await self._rollout_fn(scoped, prompt)
        if isinstance(turns, (Rollout, DynamicInferenceRequest)):
            return as_rollout(turns)
        return Rollout(list(turns))


async def _all_or_none(works: Sequence[Coroutine[Any, Any, Result]]) -> list[Result]:
    """All results. If one fails, or the caller is cancelled, the others are cancelled."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        return list(await asyncio.gather(*tasks))
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise
