"""BatchOrder: the interface of the two orders in which a producer makes batches.

Used by `trainer_hooks.producer.producer`. Implemented by AdmissionOrder and ReadyOrder.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from trainer_hooks.producer.group_pool import GroupPool
from trainer_hooks.producer.groups import ScoredGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchRecord:
    """How a batch was made. `counts`: numbers of groups by fate, since the batch before it."""

    admitted_at_version: int
    counts: Counter[str]


class BatchOrder(ABC):
    """Begins groups within the staleness bound and chooses the groups of the next batch."""

    @abstractmethod
    def begin(self) -> None:
        """Begin all groups that the current version allows, while there are prompts."""

    @abstractmethod
    def set_bound(self, max_staleness_versions: int) -> None:
        """Change the bound, also for groups in progress.

        A lower bound gives groups back to the ledger, as "stale", that are too old under it.
        """

    @abstractmethod
    def take_error(self) -> BaseException | None:
        """Return and clear an error that stopped groups, or None. The next `begin` continues."""

    @abstractmethod
    def next_groups(self) -> Sequence[ScoredGroup]:
        """Return the groups of the next batch, in order; empty while it is not complete.

        All their tokens are within the bound. Groups with older tokens are given back.
        """

    @abstractmethod
    def deliver(self, groups: Sequence[ScoredGroup]) -> BatchRecord:
        """Remove `groups`, the result of `next_groups`, since the trainer gets them.

        Returns how their batch was made.
        """

    @property
    @abstractmethod
    def is_idle(self) -> bool:
        """Whether nothing is in progress: no batch comes without newer weights or other prompts."""

    @property
    @abstractmethod
    def next_pool(self) -> GroupPool | None:
        """The pool of the groups of the next batch; None if no batch is open."""

    @property
    @abstractmethod
    def num_waiting_batches(self) -> int:
        """Number of complete batches that the trainer did not get yet."""

    @abstractmethod
    def abort(self, reason: str) -> None:
        """Cancel all groups in progress and give all prompts back."""
