"""Groups that are being made, a task each, and those that are finished."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from typing import Any

from trainer_hooks.producer.batches import FILTERED_PREFIX, ProducerError
from trainer_hooks.producer.filters import GroupFilter
from trainer_hooks.producer.groups import GroupMaker, ScoredGroup
from trainer_hooks.prompts.ledger import PromptLedger, PromptTicket

Task = asyncio.Task[ScoredGroup | None]
Spawn = Callable[[Coroutine[Any, Any, ScoredGroup | None]], Task]


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchRules:
    """What a batch is. `num_extra_groups`: begun beside the `num_groups` of each batch.

    `filters`: the first that gives a reason decides. `max_refills`: how many groups of a batch may
    be replaced.
    """

    num_groups: int
    num_extra_groups: int
    filters: Sequence[GroupFilter]
    max_refills: int


@dataclass(frozen=True, slots=True)
class GroupParts:
    """What makes groups: shared by all pools of a producer. `on_change`: a group has ended."""

    rules: BatchRules
    ledger: PromptLedger
    maker: GroupMaker
    spawn: Spawn
    on_change: Callable[[], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class BegunGroup:
    """A group that is being made. `version`: the one that all engines had when it began."""

    ticket: PromptTicket
    version: int


class GroupPool(ABC):
    """Runs a task per prompt, and says what became of each.

    Each ticket that it was issued is in a finished group, in a task, consumed, or given back.
    `finished`: with the oldest and the newest version of their tokens. `counts`: how many groups
    had each fate other than trained; reward_failed ones are counted as failed, too. `error`: what
    stopped the pool, until `take_error`.
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
        """Begin the groups that are missing, as long as there are prompts, and end those that are
        not wanted. Called when a group has ended.
        """

    def take_error(self) -> BaseException | None:
        """Return and clear the error that stopped the pool; the next `fill` continues it."""
        error, self.error = self.error, None
        if error is not None:
            self._num_refills = 0
        return error

    def give_up(self, reason: str) -> None:
        """Cancel all tasks and give all prompts back."""
        self._cancel(list(self.running), reason)
        self._drop(list(self.finished), reason)

    # ---- tasks

    def _begin_group(self, version: int) -> bool:
        """Begin the next prompt of the ledger; False if there is none."""
        ticket = self._ledger.issue()
        if ticket is None:
            return False
        task = self._spawn(self._make(ticket))
        self.running[task] = BegunGroup(ticket=ticket, version=version)
        task.add_done_callback(self._take)
        return True

    async def _make(self, ticket: PromptTicket) -> ScoredGroup | None:
        item, num_reissues = self._ledger.item(ticket), self._ledger.num_reissues(ticket)
        group = await self._maker.make(
            ticket, item, lambda fate: self.counts.update([fate]), num_reissues
        )
        if group is None or not self._rules.filters:
            return group
        history = self._ledger.history(ticket.index)
        reasons = (each(group, history) for each in self._rules.filters)
        return replace(group, filter_reason=next(filter(None, reasons), None))

    def _take(self, task: Task) -> None:
        """Record how a task has ended."""
        error = asyncio.CancelledError() if task.cancelled() else task.exception()
        begun = self.running.pop(task, None)
        if begun is None:  # it was cancelled here
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
        except Exception as unissued:  # of the loop's callbacks it would only be logged
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
        if self.counts["reward_failed"]:
            cause = self._maker.last_reward_error
            of_failed = f" (the reward function's last error was {cause!r})"
        elif self.counts["failed"] and cause is not None:
            of_failed = f" (the last request's error was {cause!r})"
        error = ProducerError(
            f"a batch of {self._rules.num_groups} groups needed more than max_refills="
            f"{self._rules.max_refills} replacements: {self.counts['filtered']} groups were "
            f"filtered{self._filter_reasons()}, {self.counts['failed']} failed{of_failed}, "
            f"{self.counts['stale']} grew too old"
        )
        error.__cause__ = cause
        return error
