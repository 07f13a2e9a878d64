"""What the two orders of batches have in common: that of admission, and that of becoming ready."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from trainer_hooks.producer.groups import ScoredGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class HandedOver:
    """How a batch was made. `counts`: of its groups by fate; see `GroupPool.counts`."""

    admitted_at_version: int
    counts: Counter[str]


class BatchOrder(ABC):
    """Begins groups as the bound allows, and says which finished ones are the next batch."""

    @abstractmethod
    def begin(self) -> None:
        """Begin all groups that the version allows and for which there are prompts."""

    @abstractmethod
    def set_bound(self, max_staleness_versions: int) -> None:
        """Let another bound hold from now on, also for what is under way.

        A lower one gives back, as "stale", what would be too old at its turn.
        """

    @abstractmethod
    def take_error(self) -> BaseException | None:
        """Return and clear an error that stopped a group; the next `begin` goes on."""

    @abstractmethod
    def next_groups(self) -> Sequence[ScoredGroup]:
        """The groups of the next batch, in order; empty as long as it is not complete.

        All their tokens keep the bound: groups of older tokens go back to the ledger.
        """

    @abstractmethod
    def hand_over(self, groups: Sequence[ScoredGroup]) -> HandedOver:
        """`groups`, as `next_groups` gave them, are the trainer's."""

    @property
    @abstractmethod
    def is_idle(self) -> bool:
        """No group is being made: without newer weights, or other prompts, no batch will come."""

    @property
    @abstractmethod
    def num_finished_groups(self) -> int:
        """Finished groups that the next batch can take; they may be more than it takes."""

    @property
    @abstractmethod
    def num_waiting_batches(self) -> int:
        """Batches that are complete and not handed over."""

    @abstractmethod
    def give_up(self, reason: str) -> None:
        """Cancel everything and give all prompts back."""
