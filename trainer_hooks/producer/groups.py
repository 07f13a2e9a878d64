"""GroupMaker: samples a group of rollouts of one prompt and scores them.

Used by the modules of `trainer_hooks.producer`. `trainer_hooks.evaluation` uses `sample_rollouts`,
and `trainer_hooks.environments` uses RolloutLLM. `trainer_hooks.train.task` and
`trainer_hooks.train.no_signal` use its types. GroupMaker calls the LLM and the reward runner, and
keeps no group.
"""

from __future__ import annotations

import asyncio
import inspect
import itertools
import logging
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

from rollout.errors import ConfigError
from rollout.requests import DynamicInferenceRequest
from rollout.sampling_params import SamplingParams
from rollout.step.seeds import mix_seed
from rollout.text import Tokenizer, as_tokenizer, encode_prompt
from trainer_hooks.losses.advantages import has_reward_spread
from trainer_hooks.prompts.ledger import PromptItem, PromptLedger, PromptTicket
from trainer_hooks.rewards import RewardFailed, RewardRunner, score_rollouts
from trainer_hooks.rewards.failures import is_power_of_ten
from trainer_hooks.rollouts import Rollout, as_rollout

logger = logging.getLogger(__name__)


class GeneratesAsync(Protocol):
    """The part of AsyncLLM that a producer uses. Cancelling `generate` aborts its requests.

    If `generate` has AsyncLLM's parameter `on_finished`, a producer counts each sample when it
    ends. Otherwise a producer counts all samples of a prompt when the last one ends.
    """

    @property
    def weights_version(self) -> int: ...

    async def generate(
        self, prompts: Any, sampling_params: SamplingParams | None = None, n: int = 1
    ) -> Any: ...


class RolloutLLM:
    """Generates the turns of one sample, each with its own seed. Passed to a `rollout_fn`.

    `sample_index`: index of the sample in its group.
    `tokenizer`: encodes text that a tool adds, or None. Never decode generated tokens to encode
    them again.
    """

    def __init__(
        self,
        llm: GeneratesAsync,
        sampling_params: SamplingParams,
        item: PromptItem,
        sample_index: int,
        tokenizer: Tokenizer | None,
    ) -> None:
        self._llm = llm
        self.sampling_params = sampling_params
        self.item, self.sample_index, self.tokenizer = item, sample_index, tokenizer
        self._num_turns = 0

    @property
    def columns(self) -> Mapping[str, Any]:
        """The columns of the prompt's row, without the prompt."""
        return self.item.columns

    async def generate(self, token_ids: Sequence[int], **changes: Any) -> DynamicInferenceRequest:
        """Return the finished request of one turn, generated after `token_ids`.

        `changes`: fields of SamplingParams for this turn. Raises ConfigError for empty `token_ids`.
        """
        if not len(token_ids):
            raise ConfigError("a turn needs a context of at least one token")
        seed = mix_seed(self.sampling_params.seed or 0, self.sample_index, self._num_turns)
        self._num_turns += 1
        params = replace(self.sampling_params, **{"seed": seed, **changes})
        request: DynamicInferenceRequest = await self._llm.generate(token_ids, params)
        return request


def tokenizer_for(llm: GeneratesAsync, tokenizer: Any | None) -> Tokenizer | None:
    """Return `tokenizer`, or the llm's if it is None, as a Tokenizer. None without either."""
    source = getattr(llm, "tokenizer", None) if tokenizer is None else tokenizer
    return None if source is None else as_tokenizer(source)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ScoredGroup:
    """The samples of one prompt and their rewards, in sample order. Failed rollouts have NaN.

    `generate_s`, `reward_s`: seconds of generation and of scoring, in the attempt that succeeded.
    `num_reissues`: number of earlier issues of the prompt whose group grew too old.
    `filter_reason`: a group filter's reason for leaving the group out. None to train on the group.
    """

    ticket: PromptTicket
    item: PromptItem
    rollouts: Sequence[Rollout]
    rewards: Sequence[float]
    generate_s: float
    reward_s: float
    num_reissues: int = 0
    filter_reason: str | None = None

    @property
    def requests(self) -> list[DynamicInferenceRequest]:
        """The requests of all samples, each sample's turns in order."""
        return [request for rollout in self.rollouts for request in rollout.requests]

    @property
    def valid_rewards(self) -> list[float]:
        return [reward for reward in self.rewards if not math.isnan(reward)]

    @property
    def mean_reward(self) -> float:
        """Mean reward of the rollouts that did not fail, or NaN if all failed."""
        valid = self.valid_rewards
        return sum(valid) / len(valid) if valid else math.nan

    @property
    def has_spread(self) -> bool:
        """Whether two rewards differ by more than rounding, so that the group has a gradient."""
        return bool(has_reward_spread(torch.tensor([self.rewards])))

    def consume(self, ledger: PromptLedger, reason: str) -> None:
        """Consume the ticket in `ledger`, with `reason`, the mean reward and the newest version."""
        seen = self.version_range()
        ledger.consume(self.ticket, reason, self.mean_reward, None if seen is None else seen[1])

    def version_range(self) -> tuple[int, int] | None:
        """Return the oldest and the newest version that sampled a token, or None without tokens."""
        ranges = [
            (int(versions.min()), int(versions.max()))
            for rollout in self.rollouts
            if len(versions := rollout.policy_versions)
        ]
        if not ranges:
            return None
        return min(low for low, _ in ranges), max(high for _, high in ranges)


Turns = Rollout | DynamicInferenceRequest | Sequence[DynamicInferenceRequest]
RolloutFunction = Callable[[RolloutLLM, Any], Awaitable[Turns]]


class GroupMaker:
    """Generates the samples of a prompt, scores them, and tries again if too many failed.

    The reward runner repeats a failed score with the same samples. If the runner gives up, the
    prompt fails without another generation.
    A group's seed is mix_seed(seed, epoch, position in the epoch, attempt), so its tokens do not
    depend on when it is made. A prompt whose group grew too old gets later attempt numbers, because
    equal seeds make the new group equally slow.
    `last_request_error`: latest error of a failed request, or None.
    `last_failure`: why the latest prompt failed in all its attempts, or None.
    """

    def __init__(
        self,
        llm: GeneratesAsync,
        reward: RewardRunner | None,
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
        self.last_request_error: BaseException | None = None
        self.last_failure: str | None = None
        self._num_failed = 0

    @property
    def last_reward_error(self) -> BaseException | None:
        """The last error of the reward function, or None."""
        return None if self._reward is None else self._reward.last_error

    async def make(
        self,
        ticket: PromptTicket,
        item: PromptItem,
        count: Callable[[str], None],
        num_reissues: int = 0,
        report_finished: Callable[[int], None] = lambda num_finished: None,
    ) -> ScoredGroup | None:
        """Return the group, or None if no attempt had enough valid samples or scoring failed.

        `count`: called with "retried" for each attempt after the first, and with "reward_failed" if
        scoring failed.
        `report_finished`: called with the number of samples that the current attempt has finished.
        Raises the errors of generation, and RewardFunctionError.
        """
        for attempt in range(self._max_attempts):
            if attempt:
                count("retried")
            try:
                group = await self._attempt(ticket, item, attempt, num_reissues, report_finished)
            except RewardFailed:  # the runner has logged it
                count("reward_failed")
                return None
            if len(group.valid_rewards) >= self._min_valid_samples:
                return group
        self._record_failure(ticket, group)
        return None

    def _record_failure(self, ticket: PromptTicket, group: ScoredGroup) -> None:
        pairs = zip(group.rollouts, group.rewards, strict=True)
        failed = next(rollout for rollout, reward in pairs if math.isnan(reward))
        self.last_failure = failed.error or "the reward was None or NaN"
        self._num_failed += 1
        if is_power_of_ten(self._num_failed):  # failures 1, 10, 100, ...
            logger.warning(
                "prompt %d is left out (%d so far): %d of its %d samples have a reward after "
                "max_attempts=%d, fewer than min_valid_samples=%d; the first without one: %s",
                ticket.index, self._num_failed, len(group.valid_rewards), len(group.rewards),
                self._max_attempts, self._min_valid_samples, self.last_failure,
            )  # fmt: skip

    async def _attempt(
        self,
        ticket: PromptTicket,
        item: PromptItem,
        attempt: int,
        num_reissues: int,
        report_finished: Callable[[int], None],
    ) -> ScoredGroup:
        loop = asyncio.get_running_loop()
        attempt += num_reissues * self._max_attempts
        seed = mix_seed(self._seed, ticket.epoch, ticket.position, attempt)
        start_s, num_finished = loop.time(), itertools.count(1)
        report_finished(0)
        rollouts = await sample_rollouts(
            self._llm,
            item,
            replace(self._params, seed=seed),
            self._group_size,
            self._rollout_fn,
            self._tokenizer,
            on_finished=lambda: report_finished(next(num_finished)),
        )
        failed = [request for each in rollouts for request in each.requests if request.failed()]
        if failed:
            self.last_request_error = failed[-1].last_error
        generated_s = loop.time()
        rewards = await score_rollouts(self._reward, item, rollouts, self._tokenizer)
        return ScoredGroup(
            ticket=ticket,
            item=item,
            rollouts=rollouts,
            rewards=rewards,
            generate_s=generated_s - start_s,
            reward_s=loop.time() - generated_s,
            num_reissues=num_reissues,
        )


async def sample_rollouts(
    llm: GeneratesAsync,
    item: PromptItem,
    params: SamplingParams,
    num_samples: int,
    rollout_fn: RolloutFunction | None,
    tokenizer: Tokenizer | None,
    on_finished: Callable[[], None] = lambda: None,
) -> list[Rollout]:
    """Return `num_samples` rollouts of a prompt, made by `rollout_fn`, or of one turn without it.

    Calls `on_finished` once per rollout when it ends. If `generate` of the llm has no parameter
    `on_finished`, all these calls come after the last sample. If one call of `rollout_fn` raises or
    this call is cancelled, all calls of `rollout_fn` are cancelled.
    """
    prompt: Any = item.prompt
    takes_text = getattr(llm, "tokenizer", None) is not None
    if isinstance(prompt, str) and not takes_text and tokenizer is not None:
        prompt = encode_prompt(tokenizer, prompt)
    if rollout_fn is None:
        reports = "on_finished" in inspect.signature(llm.generate).parameters
        options: dict[str, Any] = {"on_finished": on_finished} if reports else {}
        found = await llm.generate(prompt, params, num_samples, **options)
        # For one sample the llm returns a request, not a list.
        requests = found if isinstance(found, list) else [found]
        if not reports:
            for _ in requests:
                on_finished()
        return [as_rollout(request) for request in requests]

    async def sample(index: int) -> Rollout:
        turns = await rollout_fn(RolloutLLM(llm, params, item, index, tokenizer), prompt)
        on_finished()
        if isinstance(turns, (Rollout, DynamicInferenceRequest)):
            return as_rollout(turns)
        return Rollout(list(turns))

    tasks = [asyncio.ensure_future(sample(index)) for index in range(num_samples)]
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise
