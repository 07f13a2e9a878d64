"""State that all parts of the core share: limits, timers, counters, sessions and the outbox.

Used by `rollout.coordinator.coordinator` and the other modules of `rollout.coordinator.core`.
CoordinatorLimits are also made by `rollout.apis.fleet_processes`, `rollout.cli.coordinator` and
users. `rollout.coordinator.agent.agent` calls `num_ahead`. All state is kept in memory.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from rollout.coordinator.core.request_table import Session
from rollout.errors import ConfigError
from rollout.ranges import MAX_SECONDS, PositiveInt, PositiveSeconds, check_fields
from rollout.wire import Message

# In step_deadline_s: the next step may have longer contexts or fewer processors.
_STEP_SLACK = 4.0

TimerKey = (
    tuple[Literal["client", "engine"], bytes]
    | tuple[Literal["deadline", "orphan", "grace", "command", "probe"], int]
)


@dataclass(frozen=True, slots=True, kw_only=True)
class CoordinatorLimits:
    """Deadlines, leases and bounds of a coordinator.

    Raises ConfigError if a value is not positive, or if a lease is shorter than two heartbeats.

    client_lease_s, engine_lease_s: a peer that sends nothing for this time is removed.
    heartbeat_s: time between two heartbeats of a peer.
    probe_interval_s: time between two probes of each engine. A probe finds engines whose process
        has ended.
    progress_deadline_s: an engine that has work and ends no step for this time is removed. Models
        with slow steps get more time: see `step_deadline_s`.
    orphan_deadline_s: a waiting request fails if no engine was ready for this time.
    push_wait_s: a waiting request fails if for this time only another weight push of the trainer
        can make an engine ready.
    command_deadline_s: deadline of commands that name none.
    max_lost_attempts: a request fails when this many engines have failed while they ran it.
    abort_grace_s: time that an aborted request waits for its engine's reply.
    commit_grace_s: least time for an engine to confirm a weight commit once it is decided. An
        engine that is stepping has more time, at most two times its `step_deadline_s`.
    report_interval_tokens: most tokens of a request between two reports of its engine.
    max_clients, max_engines: the coordinator refuses further ones.
    max_client_requests: most unfinished requests of one client. InferenceClient holds back more.
    max_requests: most requests of all clients, unfinished or with a reply that is kept.
    max_client_request_bytes: most bytes of prompts and parameters in one client's unfinished
        requests.
    max_kept_reply_bytes: most bytes of one client's kept replies. Above this limit, or one of the
        three limits before it, a new request is refused with a transient error.
    max_token_log_bytes: most bytes of reported tokens of all requests. Above this limit, a request
        that does not stream resumes from an earlier token if its engine fails.
    max_answered_ids: ids of acknowledged requests kept per client, to recognize repeated
        submissions.
    max_answers: answers to commands kept per client, for repeated commands.
    max_queued_commands: most waiting commands of all clients.
    max_noted_peers: most unknown and faulty peers to remember, so that each is logged once."""

    client_lease_s: PositiveSeconds = 30.0
    engine_lease_s: PositiveSeconds = 10.0
    heartbeat_s: PositiveSeconds = 1.0
    probe_interval_s: PositiveSeconds = 0.25
    progress_deadline_s: PositiveSeconds = 60.0
    orphan_deadline_s: PositiveSeconds = 1800.0
    push_wait_s: PositiveSeconds = 60.0
    command_deadline_s: PositiveSeconds = 60.0
    max_lost_attempts: PositiveInt = 3
    abort_grace_s: PositiveSeconds = 10.0
    commit_grace_s: PositiveSeconds = 10.0
    report_interval_tokens: PositiveInt = 16
    max_clients: PositiveInt = 1024
    max_engines: PositiveInt = 1024
    max_requests: PositiveInt = 2**18
    max_client_requests: PositiveInt = 2**16
    max_client_request_bytes: PositiveInt = 2**30
    max_kept_reply_bytes: PositiveInt = 2**30
    max_token_log_bytes: PositiveInt = 2**30
    max_answered_ids: PositiveInt = 2**16
    max_answers: PositiveInt = 256
    max_queued_commands: PositiveInt = 256
    max_noted_peers: PositiveInt = 1024

    def __post_init__(self) -> None:
        check_fields(self, ConfigError)
        for name in ("client_lease_s", "engine_lease_s"):
            if getattr(self, name) < 2 * self.heartbeat_s:
                raise ConfigError(
                    f"{name}={getattr(self, name)} must be at least twice "
                    f"heartbeat_s={self.heartbeat_s}"
                )

    def step_deadline_s(self, longest_step_s: float) -> float:
        """Return how many seconds a step may take on an engine. `longest_step_s` is the engine's
        estimate of its longest step. The result is 4 times the estimate, and at least
        `progress_deadline_s`."""
        return min(max(self.progress_deadline_s, _STEP_SLACK * longest_step_s), MAX_SECONDS)

    @property
    def answer_grace_s(self) -> float:
        """Seconds after its deadline in which a request or command may still be answered."""
        # A commit decided at the deadline waits for two steps. Messages take up to 5 s.
        grace_s = max(self.abort_grace_s, self.commit_grace_s, 2 * self.progress_deadline_s) + 5.0
        return min(grace_s, MAX_SECONDS)


def num_ahead(max_requests: int) -> int:
    """Return how many requests may wait at an engine that runs up to `max_requests`. All further
    requests wait in the coordinator."""
    return max(8, max_requests // 8)


class Timers:
    """One due time per key, in seconds. The key that was set first comes first among equal times.
    Each call takes amortized logarithmic time in the number of keys."""

    def __init__(self) -> None:
        self._entry_of_key: dict[TimerKey, tuple[float, int]] = {}
        self._heap: list[tuple[float, int, TimerKey]] = []  # the same entries and outdated ones
        self._num_set = 0

    def __len__(self) -> int:
        return len(self._entry_of_key)

    def __contains__(self, key: TimerKey) -> bool:
        return key in self._entry_of_key

    def set(self, key: TimerKey, due_at: float) -> None:
        """Set the due time of `key`. Replaces an earlier due time."""
        self._num_set += 1
        self._entry_of_key[key] = entry = (due_at, self._num_set)
        heapq.heappush(self._heap, (*entry, key))
        # At twice the number of keys, so that rebuilding costs amortized constant time.
        if len(self._heap) > 64 + 2 * len(self._entry_of_key):
            self._heap = [(*entry, key) for key, entry in self._entry_of_key.items()]
            heapq.heapify(self._heap)

    def discard(self, key: TimerKey) -> None:
        self._entry_of_key.pop(key, None)

    def first_due_at(self) -> float | None:
        """Return the earliest due time, or None if no key is set."""
        heap = self._heap
        while heap:
            due_at, number, key = heap[0]
            if self._entry_of_key.get(key) == (due_at, number):
                return due_at
            heapq.heappop(heap)
        return None

    def pop_due(self, now: float) -> TimerKey | None:
        """Remove and return the key with the earliest due time, or return None if no key is due at
        `now`."""
        due_at = self.first_due_at()
        if due_at is None or due_at > now:
            return None
        key = heapq.heappop(self._heap)[2]
        del self._entry_of_key[key]
        return key


@dataclass(slots=True)
class Counters:
    """Counts since the coordinator started.

    num_requests: accepted requests. Each one ends in num_completed, num_failed or num_abandoned.
    num_failed: requests that failed in an engine or in the coordinator.
    num_abandoned: requests whose client left before they ended.
    num_refused: requests that were not accepted.
    num_reassigned: assignments of a request after its first one.
    num_duplicates: repeated submissions, tokens, replies and commands.
    num_gaps: progress reports that were dropped because tokens before them are missing or the token
        log is full.
    num_stale: messages of attempts and sessions that have been replaced.
    num_unexpected: messages that the peer may not send, or that name an unknown request or command.
    num_unknown_peers: messages of peers without a session.
    num_undelivered: messages that no frame could carry or whose peer was unreachable.
    num_engines_lost: engines that were removed, for any reason.
    num_clients_lost: clients whose lease has expired."""

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
    num_unknown_peers: int = 0
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
    """State shared by all parts of the core.

    refused: returns the number of refused connections by reason.
    outbox: (connection identity, message) pairs to send; CoordinatorCore empties the list.
    sessions: sessions by connection identity; Registry and Clients write them."""

    coordinator_id: bytes
    limits: CoordinatorLimits
    counters: Counters = field(default_factory=Counters)
    refused: Callable[[], Mapping[str, int]] = dict
    timers: Timers = field(default_factory=Timers)
    outbox: list[tuple[bytes, Message]] = field(default_factory=list)
    sessions: dict[bytes, Session] = field(default_factory=dict)

    def send(self, session: Session, message: Message) -> None:
        """Append a message for the session's peer to the outbox."""
        self.outbox.append((session.identity, message))
