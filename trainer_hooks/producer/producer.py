"""AsyncRolloutProducer: makes batches of rollouts while the trainer trains.

Used by users' asynchronous training loops, `trainer_hooks.train.main` and
`benchmarks.producer_order`. The producer submits requests to the engines, calls the reward function
and runs tasks in the caller's event loop.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import math
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from typing import Any, Literal

from rollout.errors import ConfigError
from rollout.ranges import NonNegativeInt, NonNegativeSeconds, PositiveInt, check_value
from rollout.sampling_params import SamplingParams
from trainer_hooks.collate import collate_rollouts, logprobs_mode_of
from trainer_hooks.producer.admission import AdmissionOrder
from trainer_hooks.producer.batches import (
    ProducerError,
    TrainingBatch,
    batch_metrics,
    mean_lag,
)
from trainer_hooks.producer.filters import GroupFilter, zero_variance
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
from trainer_hooks.producer.staleness import EssBound, StalenessBound
from trainer_hooks.producer.versions import VersionWatch
from trainer_hooks.prompts.curriculum import Curriculum
from trainer_hooks.prompts.ledger import PromptLedger, PromptRows, PromptTicket
from trainer_hooks.rewards import RewardRunner, as_runner
from trainer_hooks.rewards.calling import RewardFunction

logger = logging.getLogger(__name__)

Order = Literal["admission", "ready"]


def check_options(
    llm: GeneratesAsync,
    group_size: int,
    batch_groups: int,
    max_attempts: int,
    version_timeout_s: float,
    sampling_params: SamplingParams,
) -> None:
    """Raise ConfigError for options of AsyncRolloutProducer that would fail only later."""
    check_value("group_size", group_size, PositiveInt, ConfigError)
    check_value("batch_groups", batch_groups, PositiveInt, ConfigError)
    check_value("max_attempts", max_attempts, PositiveInt, ConfigError)
    check_value("version_timeout_s", version_timeout_s, NonNegativeSeconds, ConfigError)
    if not inspect.iscoroutinefunction(llm.generate):
        raise ConfigError(
            f"{type(llm).__name__}.generate cannot be awaited; use AsyncLLM, or wrap an LLM: "
            "ThreadedLLM(llm)"
        )
    if not sampling_params.return_prompt_tokens:
        raise ConfigError("return_prompt_tokens=False leaves nothing to train on; set it to True")
    if sampling_params.seed is not None:
        raise ConfigError(
            f"sampling_params.seed={sampling_params.seed}: the seeds of the groups follow from the "
            "producer's own; give it as seed=..."
        )


def ledger_of(
    prompts: PromptLedger | PromptRows | Iterable[Any],
    seed: int,
    shuffle: bool,
    num_epochs: int | None,
    curriculum: Curriculum | None,
) -> PromptLedger:
    """Return `prompts` as a ledger. Raises ConfigError for a curriculum beside a ledger."""
    if not isinstance(prompts, PromptLedger):
        return PromptLedger(prompts, seed, shuffle, num_epochs, curriculum)
    if curriculum is not None:
        raise ConfigError("prompts is a ledger; give the curriculum to the ledger")
    return prompts


def order_of(
    order: Order, parts: GroupParts, versions: VersionWatch, bound: int, max_reissues: int
) -> BatchOrder:
    """Return the batch order named `order`. Raises ConfigError for an unknown order."""
    if order == "admission":
        return AdmissionOrder(parts, versions, bound)
    if order == "ready":
        return ReadyOrder(parts, versions, bound, max_reissues)
    raise ConfigError(f"order={order!r} is not known; choose 'admission' or 'ready'")


def rules_of(
    order: Order,
    batch_groups: int,
    oversample_groups: int | None,
    filters: Sequence[GroupFilter],
    max_refills: int | None,
) -> BatchRules:
    """Return the rules of a batch, with defaults for None. Raises ConfigError for bad numbers."""
    check_value("oversample_groups", oversample_groups, NonNegativeInt | None, ConfigError)
    check_value("max_refills", max_refills, NonNegativeInt | None, ConfigError)
    if oversample_groups is None:
        oversample_groups = batch_groups // 4 if order == "ready" else 0
    return BatchRules(
        num_groups=batch_groups,
        num_extra_groups=oversample_groups,
        filters=filters,
        max_refills=10 * batch_groups if max_refills is None else max_refills,
    )


TRAINABLE = SamplingParams(return_log_probs=True, logprobs_mode="temperature")


class AsyncRolloutProducer:
    """Makes batches while the trainer trains on earlier ones, with no token older than a bound.

        async with AsyncRolloutProducer(llm, prompts, reward_fn, 8, 16, 1) as producer:
            async for batch in producer:
                ...  # a training step on batch.rollouts
                await weight_sync.apush(policy)

    A batch has `batch_groups` prompts with `group_size` samples each. The last batch of the last
    epoch may have fewer prompts. One batch makes one version of the weights. With
    `max_staleness_versions` = S, each token was sampled at most S versions before the version that
    trains on it, and at most S + 1 batches are in progress or waiting. A rollout in progress during
    an update continues under the new weights. S = "ess", or an EssBound, makes the bound follow the
    effective sample size that the trainer reports by `observe_effective_sample_size`.

    `llm`: an AsyncLLM, or a ThreadedLLM around an LLM.
    `prompts`: a ledger, or a source for PromptLedger. A source is used with `seed`, `shuffle` and
    `num_epochs`.
    `order`: "admission" returns batches in the order in which they were begun, and waits for the
    slowest rollout of each. "ready" makes a batch of whichever groups are finished. A group that
    grows too old is then sampled again, with other seeds. After `max_reissues` repetitions a batch
    waits for the group. The order "ready" favours short rollouts (see docs/producer.md).
    `reward_fn`: None if the rollouts of `rollout_fn` have rewards of their own.
    `rollout_fn`: async function (RolloutLLM, prompt) that returns a Rollout, or the requests of one
    sample, one per turn. An EnvironmentRollouts is an example. None samples one turn.
    `sampling_params`: its `logprobs_mode`, "temperature" or "processed", is the mode of the batches
    (see `collate_rollouts`).
    `temperature`: divisor of the trainer's logits. None means the temperature of `sampling_params`.
    `routing`: True adds the experts of each token to the batches.
    `min_valid_samples`: a group with fewer rewards is made again, in at most `max_attempts`
    attempts.
    `oversample_groups`: number of groups begun beyond each batch. In admission order the last
    groups to finish are aborted. In ready order they join later batches. None means a quarter of a
    batch in ready order and 0 in admission order.
    `group_filters`: decide which groups to replace. `drop_zero_variance` adds a filter of groups
    whose rewards are all equal.
    `curriculum`: draws the next prompts by their histories.
    `max_refills`: number of replacements per batch before an error. None means 10 * batch_groups.
    `version_timeout_s`: seconds that `anext()` waits for new weights if no batch can come without
    them.
    Raises ConfigError, which names the option, for options that cannot work.
    """

    def __init__(
        self,
        llm: GeneratesAsync,
        prompts: PromptLedger | PromptRows | Iterable[Any],
        reward_fn: RewardFunction | RewardRunner | None,
        group_size: int,
        batch_groups: int,
        max_staleness_versions: int | Literal["ess"] | EssBound,
        rollout_fn: RolloutFunction | None = None,
        *,
        sampling_params: SamplingParams = TRAINABLE,
        tokenizer: Any | None = None,
        seed: int = 0,
        shuffle: bool = True,
        num_epochs: int | None = None,
        curriculum: Curriculum | None = None,
        order: Order = "admission",
        max_reissues: int = 8,
        temperature: float | None = None,
        min_valid_samples: int = 2,
        max_attempts: int = 3,
        oversample_groups: int | None = None,
        drop_zero_variance: bool = False,
        group_filters: Sequence[GroupFilter] = (),
        max_refills: int | None = None,
        version_timeout_s: float = 0.0,
        pad_id: int = 0,
        routing: bool = False,
    ) -> None:
        check_options(
            llm, group_size, batch_groups, max_attempts, version_timeout_s, sampling_params
        )
        self._temperature = sampling_params.temperature if temperature is None else temperature
        self._logprobs_mode = logprobs_mode_of(sampling_params, self._temperature)
        self.ledger = ledger_of(prompts, seed, shuffle, num_epochs, curriculum)
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
        filters = [*([zero_variance] if drop_zero_variance else ()), *group_filters]
        rules = rules_of(order, batch_groups, oversample_groups, filters, max_refills)
        self._group_size, self._batch_groups, self._pad_id = group_size, batch_groups, pad_id
        self._routing = routing
        self._bound = StalenessBound(max_staleness_versions)
        self._version_timeout_s = version_timeout_s
        self._tasks: set[Task] = set()
        self._changed, self._versions = asyncio.Event(), VersionWatch(llm)
        parts = GroupParts(rules, self.ledger, maker, self._spawn, self._changed.set)
        self._order = order_of(order, parts, self._versions, self._bound.versions, max_reissues)
        self._was_entered, self._is_running, self._num_delivered = False, False, 0
        self._last_tickets: list[PromptTicket] = []

    # ---- start and end

    async def __aenter__(self) -> AsyncRolloutProducer:
        if self._was_entered:
            raise ProducerError("a producer runs once; make a new one and load the state into it")
        self._versions.start()
        self._was_entered = self._is_running = True
        self.refresh_version()
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Abort all rollouts and wait for their end. Their prompts go back to the ledger.

        Closes the reward runner if the producer made it from `reward_fn`. May be called twice.
        `state_dict` still works afterwards.
        """
        self._is_running = False
        self._order.abort("closed")
        self._changed.set()
        while self._tasks:
            await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._reward is not None and self._owns_reward:
            self._reward.close()

    def _spawn(self, work: Coroutine[Any, Any, ScoredGroup | None]) -> Task:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    # ---- state

    def state_dict(self, last_batch_trained: bool = True) -> dict[str, Any]:
        """Return the position in the prompts and the staleness bound, as JSON for a checkpoint.

        Unfinished rollouts are not included. A load issues their prompts again.
        `last_batch_trained`: whether the weights were trained on the batch that was returned last.
        If not, a load issues the prompts of that batch again.
        """
        state = self.ledger.state_dict(() if last_batch_trained else self._last_tickets)
        return state | self._bound.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a checkpoint, before `async with`. Raises ConfigError for other prompts."""
        self.ledger.load_state_dict(state)
        self._bound.load_state_dict(state)
        self._order.set_bound(self._bound.versions)

    # ---- versions

    @property
    def max_staleness_versions(self) -> int:
        """The staleness bound in force."""
        return self._bound.versions

    def observe_effective_sample_size(self, ess: float) -> int:
        """Report the ESS of the batch returned last. Returns the staleness bound.

        ESS is the effective sample size of the importance weights of a batch's tokens, which
        `policy_loss` returns as the metric `eff_sample_size`. Call this after training on the batch
        and before the push. With max_staleness_versions="ess" or an EssBound, the bound follows the
        ESS. Groups that are too old for a lower bound go back to the ledger as "stale". With a
        number as the bound, the ESS is only a metric. Raises ConfigError for an ESS outside (0, 1].
        """
        before, bound = self._bound.versions, self._bound.observe(ess)
        if bound != before:
            logger.info("max_staleness_versions %d -> %d, ESS %.2f", before, bound, ess)
            self._versions.refresh()
            self._order.set_bound(bound)
            if self._is_running:
                self._order.begin()
            self._changed.set()  # the awaited batch may have been given back
        return bound

    @property
    def version(self) -> int:
        """The newest weights version, reported by the llm or seen on a token."""
        return self._versions.newest

    @property
    def progress(self) -> tuple[int, int]:
        """Number of ended samples of the next batch, and number of samples of a whole batch."""
        pool = self._order.next_pool
        num_wanted = self._batch_groups * self._group_size
        return 0 if pool is None else pool.num_finished_samples, num_wanted

    @property
    def reward_so_far(self) -> float:
        """Mean reward of the scored samples of the next batch, or NaN without any."""
        pool = self._order.next_pool
        return math.nan if pool is None else pool.mean_reward

    def refresh_version(self) -> int:
        """Read the weights version and begin the batches that it allows. Returns the version.

        `anext()` does this too. Call this after an update if `anext()` is called much later.
        """
        self._versions.refresh()
        if self._is_running:
            self._order.begin()
        return self._versions.reported

    # ---- batches

    def __aiter__(self) -> AsyncRolloutProducer:
        return self

    async def __anext__(self) -> TrainingBatch:
        """Return the next batch when it is complete. A cancelled call loses nothing.

        Raises ProducerError if the producer is not running, if a batch needed too many
        replacements, or if a batch needs new weights and none come within `version_timeout_s`.
        Raises the error of a rollout's task, whose prompt is issued again. The next call continues.
        Raises StopAsyncIteration after the last epoch.
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
                return self._deliver(groups, loop.time() - asked_s)
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
                f"{self._bound.versions} no more prompts may be issued before newer weights are "
                "pushed, and all batches were returned; push weights after each batch, or raise "
                "max_staleness_versions"
            )
        # The llm sends no event for a new version, so it is polled.
        await asyncio.sleep(0.01)

    def _deliver(self, groups: Sequence[ScoredGroup], waited_s: float) -> TrainingBatch:
        version = self.version
        rollouts = collate_rollouts(
            [rollout for group in groups for rollout in group.rollouts],
            [reward for group in groups for reward in group.rewards],
            version,
            self._temperature,
            self._pad_id,
            self._logprobs_mode,
            self._routing,
        )
        made = self._order.deliver(groups)
        index, self._num_delivered = self._num_delivered, self._num_delivered + 1
        self._last_tickets = [group.ticket for group in groups]
        self._bound.record_delivery(mean_lag(rollouts))
        for group in groups:
            group.consume(self.ledger, "trained")
        return TrainingBatch(
            index=index,
            groups=groups,
            rollouts=rollouts,
            group_size=self._group_size,
            version=version,
            admitted_at_version=made.admitted_at_version,
            metrics={
                **batch_metrics(
                    groups,
                    rollouts,
                    made.counts,
                    waited_s=waited_s,
                    num_waiting_batches=self._order.num_waiting_batches,
                ),
                **self._bound.metrics(),
            },
        )
