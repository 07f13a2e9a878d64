"""AsyncRolloutProducer: batches of rollouts for a trainer, made while it trains."""

from __future__ import annotations

import asyncio
import inspect
from collections import deque
from collections.abc import Coroutine, Iterable, Mapping
from types import TracebackType
from typing import Any

from rollout.errors import ConfigError
from rollout.sampling_params import SamplingParams
from trainer_hooks.collate import trained_logprobs
from trainer_hooks.producer.batches import (
    BatchRules,
    OpenBatch,
    ProducerError,
    Task,
    TrainingBatch,
    batch_metrics,
    collate_groups,
)
from trainer_hooks.producer.groups import (
    GeneratesAsync,
    GroupMaker,
    RolloutFunction,
    ScoredGroup,
    tokenizer_for,
)
from trainer_hooks.prompt_ledger import PromptLedger, PromptRows, PromptTicket
from trainer_hooks.rewards import RewardRunner, as_runner
from trainer_hooks.rewards.calling import RewardFunction


class AdmissionGate:
    """Counts the batches that were admitted, and says whether one more may begin.

    Versions are counted from the producer's start. One batch makes one version: batch k is trained
    at version k. At version v at most v + S + 1 batches have ever been admitted, so batch k is
    admitted at a version >= k - S, and no token of it is more than S versions old when it is
    trained. The place of a batch becomes free with the version that it made, not with its
    hand-over: freed at the hand-over, a batch admitted while its predecessor trains would be one
    version too old at its turn.
    """

    def __init__(self, max_staleness_versions: int) -> None:
        """Raises ConfigError for a bound below 0."""
        if max_staleness_versions < 0:
            raise ConfigError(f"max_staleness_versions={max_staleness_versions} must be 0 or more")
        self.max_staleness_versions = max_staleness_versions
        self.num_admitted = 0
        self.num_handed_over = 0

    def may_admit(self, version: int) -> bool:
        """Whether the next batch may begin at `version`.

        A trainer that makes several versions of one batch frees more places than it uses. So that
        unused batches do not pile up, no more than S + 1 of them wait.
        """
        num_waiting = self.num_admitted - self.num_handed_over
        num_allowed = version + self.max_staleness_versions + 1
        return self.num_admitted < num_allowed and num_waiting <= self.max_staleness_versions

    def admit(self, version: int) -> int:
        """Admit the next batch; returns its number, from 0."""
        assert self.may_admit(version), "ask first"
        self.num_admitted += 1
        return self.num_admitted - 1

    def hand_over(self) -> None:
        """The oldest waiting batch has gone to the trainer."""
        assert self.num_handed_over < self.num_admitted, "a batch is admitted first"
        self.num_handed_over += 1


class VersionWatch:
    """The weights version of the engines: `reported` by the llm, and the `newest` one seen.

    `reported` is in force on all engines; a token may show that one engine has a newer version.
    Batches are admitted by `reported`: then no engine can sample under an older version.
    """

    def __init__(self, llm: GeneratesAsync) -> None:
        self._llm = llm
        self._start = self.reported = self.newest = 0

    @property
    def since_start(self) -> int:
        """The reported version, counted from the producer's start."""
        return self.reported - self._start

    def start(self) -> None:
        """Count from the present version."""
        self._start = self.reported = self.newest = self._llm.weights_version

    def refresh(self, version: int | None = None) -> None:
        """Ask the llm. `version`: one that the llm does not report."""
        self.reported = max(self.reported, self._llm.weights_version, version or 0)
        self.observe(self.reported)

    def observe(self, version: int) -> None:
        """A token was sampled under `version`."""
        self.newest = max(self.newest, version)


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
    batches are open at most. Batches come in the order in which they were begun. A rollout that is
    under way when weights change goes on under the new ones.

    `llm`: an AsyncLLM, or a ThreadedLLM around an LLM.
    `prompts`: a source for PromptLedger, with `seed`, `shuffle` and `num_epochs`, or a ledger.
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
        check_options(
            llm, group_size, batch_groups, max_attempts, oversample_groups, sampling_params
        )
        self._temperature = sampling_params.temperature if temperature is None else temperature
        self._logprobs_mode = trained_logprobs(sampling_params, self._temperature)
        self._group_size, self._pad_id = group_size, pad_id
        self._version_timeout_s = version_timeout_s
        if not isinstance(prompts, PromptLedger):
            prompts = PromptLedger(prompts, seed, shuffle, num_epochs)
        self.ledger = prompts
        self._reward, self._owns_reward = as_runner(reward_fn)
        self._maker = GroupMaker(
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
        self._rules = BatchRules(
            num_groups=batch_groups,
            num_extra_groups=oversample_groups,
            drop_zero_variance=drop_zero_variance,
            max_refills=10 * batch_groups if max_refills is None else max_refills,
        )
        self._gate = AdmissionGate(max_staleness_versions)
        self._open: deque[tuple[int, OpenBatch]] = deque()  # (version at admission, batch)
        self._tasks: set[Task] = set()
        self._changed = asyncio.Event()
        self._versions = VersionWatch(llm)
        self._is_running, self._num_handed_over = False, 0
        self._last_tickets: list[PromptTicket] = []

    # ---- life

    async def __aenter__(self) -> AsyncRolloutProducer:
        if self._is_running or self._gate.num_admitted:
            raise ProducerError("a producer runs once; make a new one and load the state into it")
        self._versions.start()
        self._is_running = True
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
        for _, batch in self._open:
            batch.give_up("closed")
        self._open.clear()
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
        num_groups = len(self._open[0][1].groups) if self._open else 0
        return num_groups * self._group_size, self._rules.num_groups * self._group_size

    def refresh_version(self, version: int | None = None) -> int:
        """Read the weights version and begin the batches that it allows. Returns the version.

        Asking for a batch does this as well. Call it after an update if the next batch is asked for
        much later. `version`: one that the llm does not report.
        """
        self._versions.refresh(version)
        since_start = self._versions.since_start
        while (
            self._is_running and not self.ledger.is_exhausted and self._gate.may_admit(since_start)
        ):
            self._gate.admit(since_start)
            batch = OpenBatch(self._rules, self.ledger, self._maker, self._spawn, self._changed.set)
            self._open.append((self._versions.reported, batch))
            batch.fill()
        return self._versions.reported

    # ---- batches

    def __aiter__(self) -> AsyncRolloutProducer:
        return self

    async def __anext__(self) -> TrainingBatch:
        """The oldest batch, once it is complete. Cancelled, it loses nothing.

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
            self._raise_errors()
            if not self._open:
                if self.ledger.is_exhausted:
                    raise StopAsyncIteration
                await self._wait_for_version(asked_s + self._version_timeout_s)
                continue
            for _, batch in self._open:
                batch.fill()
            _, oldest = self._open[0]
            if oldest.is_complete and self._is_young(oldest):
                if oldest.groups:
                    return self._hand_over(loop.time() - asked_s)
                self._gate.hand_over()  # the last prompts gave no group
                self._open.popleft()
                continue
            await self._changed.wait()

    def _raise_errors(self) -> None:
        for _, batch in self._open:
            if (error := batch.take_error()) is not None:
                raise error

    def _is_young(self, batch: OpenBatch) -> bool:
        """Whether every token keeps the bound; groups that do not go back to the ledger.

        The gate ensures it as long as one batch makes one version. A token newer than the reported
        version shows that the next version is in force already.
        """
        for group in batch.groups:
            if (seen := group.version_range()) is not None:
                self._versions.observe(seen[1])
        oldest = self._versions.newest - self._gate.max_staleness_versions
        return not batch.drop_older_than(oldest)

    async def _wait_for_version(self, until_s: float) -> None:
        loop = asyncio.get_running_loop()
        left_s = until_s - loop.time()
        if left_s <= 0:
            bound = self._gate.max_staleness_versions
            raise ProducerError(
                f"no batch can come at version {self.version}: with max_staleness_versions={bound}"
                f" no more than {self._gate.num_admitted} batches may be begun before newer weights"
                " are pushed, and all were handed over; push weights after each batch, or raise "
                "max_staleness_versions"
            )
        # The llm sends no event for a new version, so it is polled.
        await asyncio.sleep(min(0.01, left_s))

    def _hand_over(self, waited_s: float) -> TrainingBatch:
        admitted_at, batch = self._open[0]
        groups = batch.groups
        rollouts = collate_groups(
            groups, self.version, self._temperature, self._pad_id, self._logprobs_mode
        )
        self._open.popleft()
        self._gate.hand_over()
        index, self._num_handed_over = self._num_handed_over, self._num_handed_over + 1
        self._last_tickets = [group.ticket for group in groups]
        for ticket in self._last_tickets:
            self.ledger.consume(ticket, "trained")
        num_waiting = sum(other.is_complete for _, other in self._open)
        return TrainingBatch(
            index=index,
            groups=groups,
            rollouts=rollouts,
            group_size=self._group_size,
            version=self.version,
            admitted_at_version=admitted_at,
            metrics=batch_metrics(
                groups,
                rollouts,
                batch.counts,
                waited_s=waited_s,
                num_waiting_batches=num_waiting,
            ),
        )
