"""Batches: one whose groups are being made, and one that the trainer gets."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

from rollout.errors import RolloutError
from trainer_hooks.collate import RolloutBatch, TrainedLogprobs, collate_rollouts
from trainer_hooks.metrics.measure import rollout_metrics
from trainer_hooks.producer.groups import GroupMaker, ScoredGroup
from trainer_hooks.prompt_ledger import PromptItem, PromptLedger, PromptTicket


class ProducerError(RolloutError):
    """No batch can come: the bound forbids it, all prompts fail, or the producer is closed."""


# What became of prompts while a batch was made, under the names of its metrics.
_FATES = (
    "aborted",
    "failed",
    "reward_failed",  # those of the failed whose score failed
    "filtered",
    "stale",
    "error",
    "retried",
    "refilled",
)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TrainingBatch:
    """`rollouts`: the tensors, group by group in the order of `groups`, `group_size` rows each.

    `index`: how many batches this producer handed over before. `version`: the weights version that
    it is to be trained at. `admitted_at_version`: the one at which it was begun. `metrics`: flat,
    for MetricsLogger; those of `rollout_metrics`, and how the batch was made.
    """

    index: int
    groups: Sequence[ScoredGroup]
    rollouts: RolloutBatch
    group_size: int
    version: int
    admitted_at_version: int
    metrics: dict[str, float]

    @property
    def items(self) -> list[PromptItem]:
        """The prompts, one per group."""
        return [group.item for group in self.groups]

    def __len__(self) -> int:
        """Number of groups."""
        return len(self.groups)


def collate_groups(
    groups: Sequence[ScoredGroup],
    version: int,
    temperature: float,
    pad_id: int,
    logprobs_mode: TrainedLogprobs,
) -> RolloutBatch:
    """The rollouts of all groups as one batch. Raises what collate_rollouts raises."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    rewards = [reward for group in groups for reward in group.rewards]
    return collate_rollouts(rollouts, rewards, version, temperature, pad_id, logprobs_mode)


def _finish_reasons(groups: Sequence[ScoredGroup]) -> list[str | None]:
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    return [rollout.requests[-1].finish_reason for rollout in rollouts]


def batch_metrics(
    groups: Sequence[ScoredGroup],
    rollouts: RolloutBatch,
    counts: Counter[str],
    *,
    waited_s: float,
    num_waiting_batches: int,
) -> dict[str, float]:
    """Metrics of the rollouts, where the time of their batch went, in seconds, and what became of
    its prompts, in groups.

    `timing_s/batch_wait` is how long the trainer waited; generation and rewards ran beside it.
    """
    group_size = len(groups[0].rewards)
    generate_s = [group.generate_s for group in groups]
    reward_s = [group.reward_s for group in groups]
    num_samples = sum(len(group.rewards) for group in groups)
    num_valid = sum(len(group.valid_rewards) for group in groups)
    return {
        **rollout_metrics(rollouts, group_size, finish_reasons=_finish_reasons(groups)),
        "timing_s/batch_wait": waited_s,
        "timing_s/group_generate_mean": sum(generate_s) / len(groups),
        "timing_s/group_generate_max": max(generate_s),
        "timing_s/group_reward_mean": sum(reward_s) / len(groups),
        "timing_s/group_reward_max": max(reward_s),
        "rollouts/num_groups": len(groups),
        "rollouts/num_failed_samples": num_samples - num_valid,
        "rollouts/num_waiting_batches": num_waiting_batches,
        **{f"rollouts/num_{fate}_groups": counts[fate] for fate in _FATES},
    }


Task = asyncio.Task[ScoredGroup | None]
Spawn = Callable[[Coroutine[Any, Any, ScoredGroup | None]], Task]


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchRules:
    """A batch begins `num_groups` and `num_extra_groups`, and aborts the last ones to finish."""

    num_groups: int
    num_extra_groups: int
    drop_zero_variance: bool
    max_refills: int


class OpenBatch:
    """A batch whose groups are being made: a task per prompt, and refills until it has its groups.

    Each ticket that it was issued is in one of its groups, in a task, consumed, or given back.
    `counts`: how many groups had each fate other than trained; reward_failed ones are counted as
    failed, too. `error`: what stopped the batch, until `take_error`.
    """

    def __init__(
        self,
        rules: BatchRules,
        ledger: PromptLedger,
        maker: GroupMaker,
        spawn: Spawn,
        on_change: Callable[[], None],
    ) -> None:
        self._rules, self._ledger, self._maker = rules, ledger, maker
        self._spawn, self._on_change = spawn, on_change
        self._groups: list[ScoredGroup] = []
        self._running: dict[Task, PromptTicket] = {}
        self._num_refills = 0  # since the last error
        self.counts: Counter[str] = Counter()
        self.error: BaseException | None = None

    @property
    def groups(self) -> list[ScoredGroup]:
        """The finished groups, in the order in which their prompts were first issued.

        Without over-sampling, a batch that used the ledger alone does not depend on timing: it has
        the first prompts that passed.
        """
        return sorted(self._groups, key=lambda group: group.ticket)

    @property
    def is_complete(self) -> bool:
        """Whether it has all its groups, or those that the last prompts gave."""
        is_full = len(self._groups) >= self._rules.num_groups
        no_more = not self._running and self._ledger.is_exhausted
        return self.error is None and (is_full or no_more)

    def fill(self) -> None:
        """Begin the missing groups, as long as there are prompts."""
        while self.error is None and self._num_missing() > 0:
            ticket = self._ledger.issue()
            if ticket is None:
                return
            task = self._spawn(self._make(ticket))
            self._running[task] = ticket
            task.add_done_callback(self._take)

    def _num_missing(self) -> int:
        if len(self._groups) >= self._rules.num_groups:
            return 0
        wanted = self._rules.num_groups + self._rules.num_extra_groups
        return wanted - len(self._groups) - len(self._running)

    async def _make(self, ticket: PromptTicket) -> ScoredGroup | None:
        item = self._ledger.item(ticket)
        return await self._maker.make(ticket, item, lambda fate: self.counts.update([fate]))

    def _take(self, task: Task) -> None:
        """Record how a task has ended."""
        error = asyncio.CancelledError() if task.cancelled() else task.exception()
        ticket = self._running.pop(task, None)
        if ticket is None:  # it was given up
            return
        if error is None:
            self._judge(ticket, task.result())
        else:
            self._return(ticket, "error")
            if task.cancelled():
                error = ProducerError("a rollout's task was cancelled from outside the producer")
            self.error = self.error or error
        self.fill()
        self._on_change()

    def _judge(self, ticket: PromptTicket, group: ScoredGroup | None) -> None:
        if group is None:
            self._consume(ticket, "failed")
        elif self._rules.drop_zero_variance and not group.has_spread:
            self._consume(ticket, "filtered")
        else:
            self._groups.append(group)
            if len(self._groups) == self._rules.num_groups:
                self._give_up_running("aborted")

    def _consume(self, ticket: PromptTicket, reason: str) -> None:
        self._ledger.consume(ticket, reason)
        self.counts[reason] += 1
        self._count_refill()

    def _return(self, ticket: PromptTicket, reason: str) -> None:
        self._ledger.give_back(ticket, reason)
        self.counts[reason] += 1

    def _count_refill(self) -> None:
        self._num_refills += 1
        self.counts["refilled"] += 1
        if self._num_refills > self._rules.max_refills and self.error is None:
            self.error = self._refill_error()

    def _refill_error(self) -> ProducerError:
        cause, of_rewards = None, ""
        if self.counts["reward_failed"]:
            cause = self._maker.last_reward_error
            of_rewards = f" (the reward function's last error was {cause!r})"
        error = ProducerError(
            f"a batch of {self._rules.num_groups} groups needed more than max_refills="
            f"{self._rules.max_refills} replacements: {self.counts['filtered']} groups were "
            f"filtered for equal rewards, {self.counts['failed']} failed{of_rewards}, "
            f"{self.counts['stale']} grew too old"
        )
        error.__cause__ = cause
        return error

    def _give_up_running(self, reason: str) -> None:
        running, self._running = self._running, {}
        for task, ticket in running.items():
            task.cancel()
            self._return(ticket, reason)

    # ---- what the producer asks for

    def drop_older_than(self, version: int) -> int:
        """Give back the groups with a token sampled before `version`, and refill. Returns how many.

        A refill that `max_refills` forbids sets `error`.
        """
        stale = [g for g in self._groups if (seen := g.version_range()) and seen[0] < version]
        for group in stale:
            self._groups.remove(group)
            self._return(group.ticket, "stale")
            self._count_refill()
        self.fill()
        if stale:
            self._on_change()
        return len(stale)

    def take_error(self) -> BaseException | None:
        """Return and clear the error that stopped the batch; the next `fill` continues it."""
        error, self.error = self.error, None
        if error is not None:
            self._num_refills = 0
        return error

    def give_up(self, reason: str) -> None:
        """Cancel all tasks and give all prompts back."""
        self._give_up_running(reason)
        for group in self._groups:
            self._return(group.ticket, reason)
        self._groups.clear()
