"""ReadyOrder: makes a batch of whichever groups are finished.

Used by `trainer_hooks.producer.producer`, for order="ready".
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from rollout.errors import ConfigError
from trainer_hooks.producer.group_pool import GroupParts, GroupPool, Task
from trainer_hooks.producer.groups import ScoredGroup
from trainer_hooks.producer.order import BatchOrder, BatchRecord
from trainer_hooks.producer.versions import VersionWatch
from trainer_hooks.prompts.ledger import STALE, PromptTicket


class ReadyOrder(GroupPool, BatchOrder):
    """A pool of groups. The next batch takes the finished groups with the oldest tokens.

    One batch makes one version, and S is the staleness bound. A group begun at version v has no
    token that is too old for the batches up to version v + S. A group that is too old for the next
    batch is aborted, or dropped if finished. The group's prompt goes back to the ledger as "stale"
    and is issued again with other seeds. Rollouts that take longer than S versions are therefore
    sampled again until they are shorter.
    After `max_reissues` reissues of a prompt, the last batch that its group can join waits for the
    group.
    At most as many groups are open as S + 1 batches need with over-sampling. Fewer are open if most
    recent groups finished in time and passed the filters.
    Raises ConfigError for a negative `max_reissues`.
    """

    def __init__(
        self,
        parts: GroupParts,
        versions: VersionWatch,
        max_staleness_versions: int,
        max_reissues: int,
    ) -> None:
        super().__init__(parts)
        if max_reissues < 0:
            raise ConfigError(f"max_reissues={max_reissues} must be 0 or more")
        self._versions, self._bound = versions, max_staleness_versions
        self._max_reissues = max_reissues
        self._next_version = 0
        self._usable_share = 0.5  # an assumption until groups have been counted

    def begin(self) -> None:
        self.fill()

    def set_bound(self, max_staleness_versions: int) -> None:
        self._bound = max_staleness_versions
        self._give_back_stale()

    def fill(self) -> None:
        """Give back groups that can join no batch, then begin groups up to the limit."""
        self._give_back_stale()
        while (
            self.error is None
            and self._has_room(self._versions.reported)
            and self._begin_group(self._versions.reported)
        ):
            pass

    def _give_back_stale(self) -> None:
        self._versions.refresh()
        for seen in self.finished.values():
            if seen is not None:
                self._versions.observe(seen[1])
        self._next_version = max(self._next_version, self._versions.newest)
        oldest = self._next_version - self._bound
        self._drop([g for g, seen in self.finished.items() if seen and seen[0] < oldest], STALE)
        self._cancel([task for task, b in self.running.items() if b.version < oldest], STALE)

    def _has_room(self, version: int) -> bool:
        num_batches = version + self._bound - self._next_version + 1
        num_places = num_batches * self._rules.num_groups
        # Finished groups that are at least as old come first in these batches.
        num_before = sum(seen is not None and seen[0] <= version for seen in self.finished.values())
        num_open = len(self.running) + len(self.finished)
        return num_before < num_places and num_open < self._num_wanted(num_places)

    def _num_wanted(self, num_places: int) -> float:
        """Return how many groups to keep open so that `num_places` of them end usable."""
        # Two standard deviations in reserve. The share is below 1: one group may always be late.
        share = min(max(self._usable_share, 0.05), 1.0 - 1.0 / max(num_places, 2))
        spread = math.sqrt(num_places * (1.0 - share)) / share
        max_open = (self._bound + 1) * (self._rules.num_groups + self._rules.num_extra_groups)
        return min(num_places / share + 2.0 * spread, max_open)

    def _judge(self, ticket: PromptTicket, group: ScoredGroup | None) -> None:
        super()._judge(ticket, group)
        self._count_usable(group in self.finished)

    def _cancel(self, tasks: list[Task], reason: str) -> None:
        super()._cancel(tasks, reason)
        for _ in tasks:
            self._count_usable(False)

    def _count_usable(self, is_usable: bool) -> None:
        weight = 1.0 / (4 * self._rules.num_groups)  # a mean over about four batches
        self._usable_share += weight * (is_usable - self._usable_share)

    def next_groups(self) -> Sequence[ScoredGroup]:
        self.fill()
        is_last = not self.running and self._ledger.is_exhausted
        is_full = len(self.finished) >= self._rules.num_groups
        if self.error is not None or not (is_full or is_last) or self._is_waited_for():
            return ()
        return sorted(self.next_finished, key=lambda group: group.ticket)

    @property
    def next_finished(self) -> Sequence[ScoredGroup]:
        return sorted(self.finished, key=self._urgency)[: self._rules.num_groups]

    def _urgency(self, group: ScoredGroup) -> tuple[int, int, PromptTicket]:
        """Return a sort key: groups with the oldest tokens first, then often reissued prompts."""
        return (self._oldest_version(group), -group.num_reissues, group.ticket)

    def _oldest_version(self, group: ScoredGroup) -> int:
        seen = self.finished[group]
        return self._versions.newest if seen is None else seen[0]

    def _is_waited_for(self) -> bool:
        """Return whether a running group is too old for later batches and has no reissues left."""
        oldest = self._next_version - self._bound
        return any(
            begun.version <= oldest
            and self._ledger.num_reissues(begun.ticket) >= self._max_reissues
            for begun in self.running.values()
        )

    def deliver(self, groups: Sequence[ScoredGroup]) -> BatchRecord:
        oldest = min(self._oldest_version(group) for group in groups)
        made = BatchRecord(admitted_at_version=oldest, counts=self.counts)
        for group in groups:
            del self.finished[group]
        self._next_version += 1
        self._num_refills, self.counts = 0, Counter()
        self.fill()
        return made

    @property
    def is_idle(self) -> bool:
        return not self.running

    @property
    def next_pool(self) -> ReadyOrder:
        return self

    @property
    def num_waiting_batches(self) -> int:
        return len(self.finished) // self._rules.num_groups
