"""Context: what all parts of the coordinator's logic read and write."""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from typing import Literal

from rollout.coordinator.core.limits import CoordinatorLimits
from rollout.coordinator.core.request_table import Session
from rollout.coordinator.protocol.messages import Message

TimerKey = (
    tuple[Literal["client", "engine"], bytes]
    | tuple[Literal["deadline", "orphan", "grace", "command", "probe"], int]
)


class Timers:
    """When what is due: one time per key. Of equal times the one set first comes first. Every call
    is logarithmic in the number of keys (amortized)."""

    def __init__(self) -> None:
        self._entry_of_key: dict[TimerKey, tuple[float, int]] = {}
        self._heap: list[tuple[float, int, TimerKey]] = []  # these entries, and outdated ones
        self._num_set = 0

    def __len__(self) -> int:
        return len(self._entry_of_key)

    def __contains__(self, key: TimerKey) -> bool:
        return key in self._entry_of_key

    def set(self, key: TimerKey, due_at: float) -> None:
        """Give the key this time, and no other."""
        self._num_set += 1
        self._entry_of_key[key] = entry = (due_at, self._num_set)
        heapq.heappush(self._heap, (*entry, key))
        # Twice the keys and more: outdated entries pay for the rebuilding that drops them.
        if len(self._heap) > 64 + 2 * len(self._entry_of_key):
            self._heap = [(*entry, key) for key, entry in self._entry_of_key.items()]
            heapq.heapify(self._heap)

    def discard(self, key: TimerKey) -> None:
        """Forget the key if it is there."""
        self._entry_of_key.pop(key, None)

    def first_due_at(self) -> float | None:
        """The first time; None without any."""
        heap = self._heap
        while heap:
            due_at, number, key = heap[0]
            if self._entry_of_key.get(key) == (due_at, number):
                return due_at
            heapq.heappop(heap)
        return None

    def pop_due(self, now: float) -> TimerKey | None:
        """The first key if its time is at most `now`, and forget it; None without such a key."""
        due_at = self.first_due_at()
        if due_at is None or due_at > now:
            return None
        key = heapq.heappop(self._heap)[2]
        del self._entry_of_key[key]
        return key


@dataclass(slots=True)
class Counters:
    """Since the coordinator was made.

    num_requests: taken; each ends as one of num_completed, num_failed (engines' word or ours) and
    num_abandoned (its client has gone). num_refused: not taken. num_duplicates: submits, tokens
    and ends that were known already. num_gaps: progress that did not join on, or had no memory.
    num_stale: of attempts and registrations that count no more. num_unexpected: messages that the
    peer may not send or that name nothing known. num_undelivered: the peer could not be reached.
    """

    num_frames: int = 0
    num_requests: int = 0
    num_refused: int = 0
    num_completed: int = 0
    num_failed: int = 0
    num_abandoned: int = 0
    num_reassigned: int = 0
    num_stale: int = 0
    num_duplicates: int = 0
    num_gaps: int = 0
    num_malformed: int = 0
    num_strangers: int = 0
    num_unexpected: int = 0
    num_undelivered: int = 0
    num_engines_joined: int = 0
    num_engines_lost: int = 0
    num_clients_lost: int = 0
    num_commands: int = 0
    num_commands_refused: int = 0
    num_weight_commits: int = 0
    num_weight_rollbacks: int = 0


@dataclass(slots=True)
class Context:
    """`outbox`: to whom, what; emptied by the core's owner. `sessions`: by where they are reached;
    written by Registry and Clients."""

    coordinator_id: bytes
    limits: CoordinatorLimits
    counters: Counters = field(default_factory=Counters)
    timers: Timers = field(default_factory=Timers)
    outbox: list[tuple[bytes, Message]] = field(default_factory=list)
    sessions: dict[bytes, Session] = field(default_factory=dict)

    def send(self, session: Session, message: Message) -> None:
        self.outbox.append((session.identity, message))
