"""Context: timers, counters, sessions and the outbox, which all parts of the core share."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping
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
    """One due time per key, in seconds. Of equal times, the one that was set first comes first.
    Each call takes logarithmic time in the number of keys (amortized)."""

    def __init__(self) -> None:
        self._entry_of_key: dict[TimerKey, tuple[float, int]] = {}
        self._heap: list[tuple[float, int, TimerKey]] = []  # these entries, and outdated ones
        self._num_set = 0

    def __len__(self) -> int:
        return len(self._entry_of_key)

    def __contains__(self, key: TimerKey) -> bool:
        return key in self._entry_of_key

    def set(self, key: TimerKey, due_at: float) -> None:
        """Set the time of the key, which replaces an earlier one."""
        self._num_set += 1
        self._entry_of_key[key] = entry = (due_at, self._num_set)
        heapq.heappush(self._heap, (*entry, key))
        # At twice the number of keys, so that rebuilding costs amortized constant time.
        if len(self._heap) > 64 + 2 * len(self._entry_of_key):
            self._heap = [(*entry, key) for key, entry in self._entry_of_key.items()]
            heapq.heapify(self._heap)

    def discard(self, key: TimerKey) -> None:
        """Remove the key if it is set."""
        self._entry_of_key.pop(key, None)

    def first_due_at(self) -> float | None:
        """Return the earliest time; None if no key is set."""
        heap = self._heap
        while heap:
            due_at, number, key = heap[0]
            if self._entry_of_key.get(key) == (due_at, number):
                return due_at
            heapq.heappop(heap)
        return None

    def pop_due(self, now: float) -> TimerKey | None:
        """Remove and return the first key if it is due at `now`; None if no key is."""
        due_at = self.first_due_at()
        if due_at is None or due_at > now:
            return None
        key = heapq.heappop(self._heap)[2]
        del self._entry_of_key[key]
        return key


@dataclass(slots=True)
class Counters:
    """Counts since the coordinator was made.

    num_requests: accepted requests; each ends as one of num_completed, num_failed (by an engine or
    by the coordinator) and num_abandoned (its client has gone). num_refused: requests that were not
    accepted. num_duplicates: submissions, tokens and replies that were known already. num_gaps:
    progress that was not kept: tokens were missing before it, or the log was full. num_stale:
    messages of attempts and sessions that have been replaced. num_unexpected: messages that the
    peer may not send, or that name nothing known. num_undelivered: messages to unreachable peers.
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
    """refused: connections that were, by reason. outbox: (identity, message) to be sent; the
    core empties it. sessions: by identity; Registry and Clients write it.
    """

    coordinator_id: bytes
    limits: CoordinatorLimits
    counters: Counters = field(default_factory=Counters)
    refused: Callable[[], Mapping[str, int]] = dict
    timers: Timers = field(default_factory=Timers)
    outbox: list[tuple[bytes, Message]] = field(default_factory=list)
    sessions: dict[bytes, Session] = field(default_factory=dict)

    def send(self, session: Session, message: Message) -> None:
        self.outbox.append((session.identity, message))
