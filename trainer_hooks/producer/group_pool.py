"""GroupPool: runs one task per prompt and keeps the finished groups.

Base class of OpenBatch (`trainer_hooks.producer.admission`) and ReadyOrder
(`trainer_hooks.producer.ready`). `trainer_hooks.producer.producer` makes its GroupParts, and
`trainer_hooks.producer.order` returns pools. A pool takes prompts from the ledger, and consumes
each or gives it back.
"""

from __future__ import annotations

import asyncio
import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from typing import Any

from trainer_hooks.producer.batches import FILTERED_PREFIX, ProducerError
from trainer_hooks.producer.filters import GroupFilter
from trainer_hooks.producer.groups import GroupMaker, ScoredGroup
from trainer_hooks.prompts.ledger import PromptLedger, PromptTicket
from trainer_hooks.rewards.failures import raised_at

Task = asyncio.Task[ScoredGroup | None]
Spawn = Callable[[Coroutine[Any, Any, ScoredGroup | None]], Task]


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchRules:
    """The composition of a batch.

    `num_groups`: number of groups of a batch.
    `num_extra_groups`: number of groups begun beyond `num_groups`.
    `filters`: group filters. The first one that returns a reason decides.
    `max_refills`: number of groups that may be replaced per batch before an error.
    """

    num_groups: int
    num_extra_groups: int
    filters: Sequence[GroupFilter]
    max_refills: int


@dataclass(frozen=True, slots=True)
class GroupParts:
    """The parts of a producer that all its pools share.

    `spawn`: starts a task that the producer ends when it closes.
    `on_change`: called when the groups of a pool have changed.
    """

    rules: BatchRules
    ledger: PromptLedger
    maker: GroupMaker
    spawn: Spawn
    on_change: Callable[[], None]


@dataclass(slots=True, kw_only=True, eq=False)
class BegunGroup:
    """A group in progress. Written by the pool that begins it.

    `version`: weights version that all engines had when the group began.
    """

    ticket: PromptTicket
    version: int
    num_finished_samples: int = 0


class GroupPool(ABC):
    """Runs a task per prompt and records the fate of each prompt.

    Each issued ticket is in a finished group, in a running task, consumed, or given back.
    `running`: tasks in progress.
    `finished`: groups to train on. Each maps to its tokens' (oldest, newest) version, or to None if
    it has no tokens.
    `counts`: number of groups by fate. Groups with the fate reward_failed also count as failed.
    `error`: error that stopped the pool. `take_error` clears it.
    """

    def __init__(self, parts: GroupParts) -> None:
        self._rules, self._ledger, self._maker = parts.rules, parts.ledger, parts.maker
        self._spawn, self._on_change = parts.spawn, parts.on_change
        self.running: dict[Task, BegunGroup] = {}
        self.finished: dict[ScoredGroup, tuple[int, int] | None] = {}
        self._num_refills = 0  # since the last batch or error
        self.counts: Counter[str] = Counter()
        self.error: BaseException | None = None

    @abstractmethod
    def fill(self) -> None:
        """Begin missing groups while there are prompts, and cancel groups that are not needed.

        Called after the end of each group.
        """

    @property
    def num_finished_samples(self) -> int:
        """Number of ended samples in finished or running groups that can form the next batch."""
        finished = [len(group.rewards) for group in self.finished]
        running = [begun.num_finished_samples for begun in self.running.values()]
        return sum([*finished, *sorted(running, reverse=True)][: self._rules.num_groups])

    @property
    def next_finished(self) -> Sequence[ScoredGroup]:
        """Finished groups of the next batch so far."""
        return list(self.finished)

    @property
    def mean_reward(self) -> float:
        """Mean reward of the samples in `next_finished`, or NaN without a valid reward."""
        rewards = [reward for group in self.next_finished for reward in group.valid_rewards]
        return sum(rewards) / len(rewards) if rewards else math.nan

    def take_error(self) -> BaseException | None:
        """Return and clear the error that stopped the pool, or None. The next `fill` continues."""
        error, self.error = self.error, None
        if error is not None:
            self._num_refills = 0
        return error

    def abort(self, reason: str) -> None:
        """Cancel all tasks and give the prompts of all groups back to the ledger."""
        self._cancel(list(self.running), reason)
        self._drop(list(self.finished), reason)

    # ---- tasks

    def _begin_group(self, version: int) -> bool:
        ticket = self._ledger.issue()
        if ticket is None:
            return False
        begun = BegunGroup(ticket=ticket, version=version)
        task = self._spawn(self._make(begun))
        self.running[task] = begun
        task.add_done_callback(self._record_end)
        return True

    async def _make(self, begun: BegunGroup) -> ScoredGroup | None:
        ticket = begun.ticket

        def report_finished(num_finished: int) -> None:
            begun.num_finished_samples = num_finished

        group = await self._maker.make(
            ticket,
            self._ledger.item(ticket),
            lambda fate: self.counts.update([fate]),
            self._ledger.num_reissues(ticket),
            report_finished,
        )
        if group is None or not self._rules.filters:
            return group
        history = self._ledger.history(ticket.index)
        reasons = (each(group, history) for each in self._rules.filters)
        return replace(group, filter_reason=next(filter(None, reasons), None))

    def _record_end(self, task: Task) -> None:
        error = asyncio.CancelledError() if task.cancelled() else task.exception()
        begun = self.running.pop(task, None)
        if begun is None:  # this pool cancelled the task
            return
        if error is None:
            self._judge(begun.ticket, task.result())
        else:
            self._return(begun.ticket, "error")
            if task.cancelled():
                error = ProducerError("a rollout's task was cancelled from outside the producer")
            self.error = self.error or error
        try:
            self.fill()
        except Exception as unissued:  # raised in a callback, it would only be logged
            self.error = self.error or unissued
        self._on_change()

    def _judge(self, ticket: PromptTicket, group: ScoredGroup | None) -> None:
        if group is None:
            self._ledger.consume(ticket, "failed")
            self._count_consumed("failed")
        elif group.filter_reason is not None:
            group.consume(self._ledger, "filtered")
            self.counts[f"{FILTERED_PREFIX}{group.filter_reason}"] += 1
            self._count_consumed("filtered")
        else:
            self.finished[group] = group.version_range()

    def _cancel(self, tasks: list[Task], reason: str) -> None:
        for task in tasks:
            begun = self.running.pop(task)
            task.cancel()
            self._return(begun.ticket, reason)

    def _drop(self, groups: list[ScoredGroup], reason: str) -> None:
        for group in groups:
            del self.finished[group]
            self._return(group.ticket, reason)

    # ---- fates

    def _return(self, ticket: PromptTicket, reason: str) -> None:
        self._ledger.give_back(ticket, reason)
        self.counts[reason] += 1

    def _count_consumed(self, fate: str) -> None:
        self.counts[fate] += 1
        self._count_refill()

    def _count_refill(self) -> None:
        self._num_refills += 1
        self.counts["refilled"] += 1
        if self._num_refills > self._rules.max_refills and self.error is None:
            self.error = self._refill_error()

    def _filter_reasons(self) -> str:
        reasons = {
            name.removeprefix(FILTERED_PREFIX): count
            for name, count in self.counts.items()
            if name.startswith(FILTERED_PREFIX)
        }
        return f" ({', '.join(f'{n} {reason}' for reason, n in reasons.items())})" * bool(reasons)

    def _refill_error(self) -> ProducerError:
        cause, of_failed = self._maker.last_request_error, ""
        reward_error = self._maker.last_reward_error
        if self.counts["reward_failed"] and reward_error is not None:
            cause = reward_error
            of_failed = f" (the reward function's last error was {raised_at(cause)}: {cause})"
        elif self.counts["failed"]:
            of_failed = f" (the last one: {self._maker.last_failure})"
        error = ProducerError(
            f"a batch of {self._rules.num_groups} groups needed more than max_refills="
            f"{self._rules.max_refills} replacements: {self.counts['filtered']} groups were "
            f"filtered{self._filter_reasons()}, {self.counts['failed']} failed{of_failed}, "
            f"{self.counts['stale']} grew too old"
        )
        error.__cause__ = cause
        return error
