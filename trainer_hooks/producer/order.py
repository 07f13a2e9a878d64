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
    """How a batch was made. `counts`: number of groups by fate, since the previous batch."""

    admitted_at_version: int
    counts: Counter[str]


class BatchOrder(ABC):
    """Begins groups within the staleness bound and chooses the groups of the next batch."""

    @abstractmethod
    def begin(self) -> None:
        """Begin all groups that the current version allows, while there are prompts."""

    @abstractmethod
    def set_bound(self, max_staleness_versions: int) -> None:
        """Change the bound. Groups that are too old under it go back to the ledger as "stale"."""

    @abstractmethod
    def take_error(self) -> BaseException | None:
        """Return and clear the error that stopped groups, or None. The next `begin` continues."""

    @abstractmethod
    def next_groups(self) -> Sequence[ScoredGroup]:
        """Return the groups of the next batch in order, or () while the batch is incomplete.

        All tokens of these groups are within the bound. Groups with older tokens go back to the
        ledger.
        """

    @abstractmethod
    def deliver(self, groups: Sequence[ScoredGroup]) -> BatchRecord:
        """Remove `groups`, which `next_groups` returned, and return how their batch was made."""

    @property
    @abstractmethod
    def is_idle(self) -> bool:
        """Whether no group is in progress, so that a batch needs newer weights or more prompts."""

    @property
    @abstractmethod
    def next_pool(self) -> GroupPool | None:
        """The pool with the groups of the next batch, or None if no batch is open."""

    @property
    @abstractmethod
    def num_waiting_batches(self) -> int:
        """Number of complete batches that the trainer has not received yet."""

    @abstractmethod
    def abort(self, reason: str) -> None:
        """Cancel all groups in progress and give all prompts back to the ledger."""
