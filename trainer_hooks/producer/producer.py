"""AsyncRolloutProducer: batches of rollouts for a trainer, made while it trains."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, Literal

from rollout.errors import ConfigError
from rollout.sampling_params import SamplingParams
from trainer_hooks.collate import trained_logprobs
from trainer_hooks.producer.admission import AdmissionOrder
from trainer_hooks.producer.batches import (
    ProducerError,
    TrainingBatch,
    batch_metrics,
    collate_groups,
)
from trainer_hooks.producer.group_pool import BatchRules, GroupParts, Task
from trainer_hooks.producer.groups import (
    GeneratesAsync,
    GroupMaker,
    RolloutFunction,
    ScoredGroup,
    tokenizer_for,
)
from trainer_hooks.producer.order import BatchOrder
from trainer_hooks.producer.ready import ReadyOrder
from trainer_hooks.producer.versions import VersionWatch
from trainer_hooks.prompt_ledger import PromptLedger, PromptRows, PromptTicket
from trainer_hooks.rewards import RewardRunner, as_runner
from trainer_hooks.rewards.calling import RewardFunction

Order = Literal["admission", "ready"]


def check_options(
    llm: GeneratesAsync,
    group_size: int,
    batch_groups: int,
    max_attempts: int,
    oversample_groups: int,
    sampling_params: SamplingParams,
) -> None:
    """Raise ConfigError for what could only fail later."""
    least = {"group_size": 1, "batch_groups": 1, "max_attempts": 1, "oversample_groups": 0}
    given = (group_size, batch_groups, max_attempts, oversample_groups)
    for (name, low), value in zip(least.items(), given, strict=True):
        if value < low:
            raise ConfigError(f"{name}={value} must be at least {low}")
    if not inspect.iscoroutinefunction(llm.generate):
        raise ConfigError(
            f"{type(llm).__name__}.generate cannot be awaited; use AsyncLLM, or wrap an LLM: "
            "ThreadedLLM(llm)"
        )
    if not sampling_params.return_prompt_tokens:
        raise ConfigError("return_prompt_tokens=False leaves nothing to train on; set it to True")


def order_of(
    order: Order, parts: GroupParts, versions: VersionWatch, bound: int, max_reissues: int
) -> BatchOrder:
    """The order of that name. Raises ConfigError for another name, and for negative numbers."""
    if order == "admission":
        return AdmissionOrder(parts, versions, bound)
    if order == "ready":
        return ReadyOrder(parts, versions, bound, max_reissues)
    raise ConfigError(f"order={order!r} is not known; choose 'admission' or 'ready'")


TRAINABLE = SamplingParams(return_log_probs=True, logprobs_mode="temperature")


class AsyncRolloutProducer:
    """Makes batches while the trainer trains on earlier ones; no token is older than the bound.

        async with AsyncRolloutProducer(llm, prompts, reward_fn, 8, 16, 1) as producer:
            async for batch in producer:
                ...  # a training step on batch.rollouts
                await weight_sync.apush(policy)

    A batch is `batch_groups` prompts with `group_size` samples each (fewer prompts at the end of
    the last epoch). One batch makes one version of the weights. With `max_staleness_versions` S,
    each token of a batch was sampled at most S versions before the one that trains on it, and S + 1
    batches are open at most. A rollout that is under way when weights change goes on under the new
    ones.

    `llm`: an AsyncLLM, or a ThreadedLLM around an LLM.
    `prompts`: a source for PromptLedger, with `seed`, `shuffle` and `num_epochs`, or a ledger.
    `order`: `admission` hands batches over in the order in which they were begun, and waits for the
    slowest rollout of each. `ready` makes a batch of whatever groups are finished; groups that grow
    too old meanwhile are sampled again, with other seeds, and a prompt that grew too old
    `max_reissues` times is waited for. It favours short rollouts: see docs/producer.md.
    `rollout_fn`: async, (ScopedLLM, prompt) -> the requests of one sample, a turn each.
    `temperature`: the trainer's; None takes that of `sampling_params`, whose `logprobs_mode`,
    `temperature` or `processed`, is what the batches have (`collate_rollouts`).
    `min_valid_samples`: a group with fewer rewards is made again, `max_attempts` times in all.
    `oversample_groups`: begun beside each batch; the last ones to finish are aborted.
    `drop_zero_variance`: replace groups whose rewards are all equal.
    `max_refills`: replacements per batch before an error; None is 10 * batch_groups.
    `version_timeout_s`: how long asking for a batch waits for the new version that it needs.
    """

    def __init__(
        self,
        llm: GeneratesAsync,
        prompts: PromptLedger | PromptRows | Iterable[Any],
        reward_fn: RewardFunction | RewardRunner,
        group_size: int,
        batch_groups: int,
        max_staleness_versions: int,
        rollout_fn: RolloutFunction | None = None,
        *,
        sampling_params: SamplingParams = TRAINABLE,
        tokenizer: Any | None = None,
        seed: int = 0,
        shuffle: bool = True,
        num_epochs: int | None = None,
        order: Order = "admission",
        max_reissues: int = 8,
        temperature: float | None = None,
        min_valid_samples: int = 2,
        max_attempts: int = 3,
        oversample_groups: int = 0,
        drop_zero_variance: bool = False,
        max_refills: int | None = None,
        version_timeout_s: float = 0.0,
        pad_id: int = 0,
    ) -> None:
        """Raises ConfigError for options that cannot work, naming them."""
        numbers = (group_size, batch_groups, max_attempts, oversample_groups)
        check_options(llm, *numbers, sampling_params)
        self._temperature = sampling_params.temperature if temperature is None else temperature
        self._logprobs_mode = trained_logprobs(sampling_params, self._temperature)
        if not isinstance(prompts, PromptLedger):
            prompts = PromptLedger(prompts, seed, shuffle, num_epochs)
        self.ledger = prompts
        self._reward, self._owns_reward = as_runner(reward_fn)
        maker = GroupMaker(
            llm,
            self._reward,
            group_size=group_size,
            sampling_params=sampling_params,
            seed=seed,
            rollout_fn=rollout_fn,
            tokenizer=tokenizer_for(llm, tokenizer),
            min_valid_samples=min(min_valid_samples, group_size),
            max_attempts=max_attempts,
        )
        rules = BatchRules(
            num_groups=batch_groups,
            num_extra_groups=oversample_groups,
            drop_zero_variance=drop_zero_variance,
            max_refills=10 * batch_groups if max_refills is None else max_refills,
        )
        self._group_size, self._batch_groups, self._pad_id = group_size, batch_groups, pad_id
        self._bound, self._version_timeout_s = max_staleness_versions, version_timeout_s
        self._tasks: set[Task] = set()
        self._changed, self._versions = asyncio.Event(), VersionWatch(llm)
        parts = GroupParts(rules, prompts, maker, self._spawn, self._changed.set)
        self._order = order_of(order, parts, self._versions, max_staleness_versions, max_reissues)
        self._was_entered, self._is_running, self._num_handed_over = False, False, 0
        self._last_tickets: list[PromptTicket] = []

    # ---- life

    async def __aenter__(self) -> AsyncRolloutProducer:
        if self._was_entered:
            raise ProducerError("a producer runs once; make a new one and load the state into it")
        self._versions.start()
        self._was_entered = self._is_running = True
        self.refresh_version()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Abort all rollouts, wait until they are gone, and give their prompts back. Twice is fine.

        `state_dict` may still be called.
        """
        self._is_running = False
        self._order.give_up("closed")
        self._changed.set()
        while self._tasks:
            await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._owns_reward:
            self._reward.close()

    def _spawn(self, work: Coroutine[Any, Any, ScoredGroup | None]) -> Task:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    # ---- state

    def state_dict(self, last_batch_trained: bool = True) -> dict[str, Any]:
        """For the trainer's checkpoint, as JSON: which prompts are finished, and which are next.

        Unfinished rollouts are not in it; their prompts are issued again after a load.
        `last_batch_trained`: whether the weights were trained on the batch handed over last.
        """
        return self.ledger.state_dict(() if last_batch_trained else self._last_tickets)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a checkpoint; before `async with`. Raises ConfigError for other prompts."""
        self.ledger.load_state_dict(state)

    # ---- versions

    @property
    def version(self) -> int:
        """The newest weights version seen, reported by the llm or stamped on a token."""
        return self._versions.newest

    @property
    def progress(self) -> tuple[int, int]:
        """Scored rollouts of the batch that comes next, and how many it is to have."""
        finished = min(self._order.num_finished_groups, self._batch_groups)
        return finished * self._group_size, self._batch_groups * self._group_size

    def refresh_version(self, version: int | None = None) -> int:
        """Read the weights version and begin the batches that it allows. Returns the version.

        Asking for a batch does this as well. Call it after an update if the next batch is asked for
        much later. `version`: one that the llm does not report.
        """
        self._versions.refresh(version)
        if self._is_running:
            self._order.begin()
        return self._versions.reported

    # ---- batches

    def __aiter__(self) -> AsyncRolloutProducer:
        return self

    async def __anext__(self) -> TrainingBatch:
        """The next batch, once it is complete. Cancelled, it loses nothing.

        Raises ProducerError if none can come until new weights do, and for a batch that needed too
        many replacements; whatever ended a rollout's task (its prompt is issued again if one goes
        on); StopAsyncIteration after the last epoch.
        """
        loop = asyncio.get_running_loop()
        asked_s = loop.time()
        while True:
            if not self._is_running:
                raise ProducerError("the producer is not running; use it in `async with`")
            self._changed.clear()
            self.refresh_version()
            if (error := self._order.take_error()) is not None:
                raise error
            if groups := self._order.next_groups():
                return self._hand_over(groups, loop.time() - asked_s)
            if not self._order.is_idle:
                await self._changed.wait()
            elif self.ledger.is_exhausted:
                raise StopAsyncIteration
            else:
                await self._wait_for_version(asked_s + self._version_timeout_s)

    async def _wait_for_version(self, until_s: float) -> None:
        loop = asyncio.get_running_loop()
        left_s = until_s - loop.time()
        if left_s <= 0 and not self._versions.is_under_way:
            raise ProducerError(
                f"no batch can come at version {self.version}: with max_staleness_versions="
                f"{self._bound} no more prompts may be issued before newer weights are pushed, and "
                "all batches were handed over; push weights after each batch, or raise "
                "max_staleness_versions"
            )
        # The llm sends no event for a new version, so it is polled.
        await asyncio.sleep(0.01)

    def _hand_over(self, groups: Sequence[ScoredGroup], waited_s: float) -> TrainingBatch:
        version = self.version
        rollouts = collate_groups(
            groups, version, self._temperature, self._pad_id, self._logprobs_mode
        )
        made = self._order.hand_over(groups)
        index, self._num_handed_over = self._num_handed_over, self._num_handed_over + 1
        self._last_tickets = [group.ticket for group in groups]
        for ticket in self._last_tickets:
            self.ledger.consume(ticket, "trained")
        return TrainingBatch(
            index=index,
            groups=groups,
            rollouts=rollouts,
            group_size=self._group_size,
            version=version,
            admitted_at_version=made.admitted_at_version,
            metrics=batch_metrics(
                groups,
                rollouts,
                made.counts,
                waited_s=waited_s,
                num_waiting_batches=self._order.num_waiting_batches,
            ),
        )
