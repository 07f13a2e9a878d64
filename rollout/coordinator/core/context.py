"""Context: limits, timers, counters, sessions and the outbox, which all parts of the core share.

Used by the other modules of `rollout.coordinator.core`: each appends to the outbox, sets timers and
counts, in memory; CoordinatorCore takes messages and due timers. CoordinatorLimits are also made by
`rollout.apis.fleet_processes`, `rollout.cli.coordinator` and users;
`rollout.coordinator.agent.agent` calls `num_ahead`.
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

_STEP_SLACK = 4.0  # see step_deadline_s

TimerKey = (
    tuple[Literal["client", "engine"], bytes]
    | tuple[Literal["deadline", "orphan", "grace", "command", "probe"], int]
)


@dataclass(frozen=True, slots=True, kw_only=True)
class CoordinatorLimits:
    """Deadlines, leases and bounds of a coordinator. Raises ConfigError unless each is positive,
    and a heartbeat fits twice into each lease.

    client_lease_s, engine_lease_s: a peer that sends nothing for this time is removed.
    heartbeat_s: time between two heartbeats of a peer.
    probe_interval_s: time between two heartbeats to each engine; sending fails if it was killed.
    progress_deadline_s: an engine that has work and ends no step for this time is removed, unless a
        step of its model may take longer: see `step_deadline_s`.
    orphan_deadline_s: a request fails when no engine was ready for this time.
    push_wait_s: a request fails when for this time no engine had the fleet's weights and the
        transport kept no copy of them, so that only another push of the trainer would help.
    command_deadline_s: the deadline of commands that name none.
    max_lost_attempts: a request fails when this many engines have failed while they ran it.
    abort_grace_s: time that an aborted request waits for its engine's record.
    commit_grace_s: the least time that an engine has for a commit once the commit is decided. An
        engine with work has longer, as long as no step takes longer than `step_deadline_s`.
    report_interval_tokens: most tokens of a request between two reports of its engine.
    max_clients, max_engines: the coordinator refuses further ones.
    max_client_requests: unfinished requests of one client. InferenceClient holds further ones back.
    max_requests: unfinished requests and kept replies of all clients.
    max_client_request_bytes: bytes of prompts and parameters of one client's unfinished requests.
    max_kept_reply_bytes: bytes of one client's kept replies. A new request beyond this limit or the
        three before it is refused with a transient error.
    max_token_log_bytes: bytes of reported tokens of all requests. Beyond it, a request that is not
        streamed resumes from an earlier token if its engine fails.
    max_answered_ids: acknowledged requests per client whose ids are kept, to recognize repeated
        submissions.
    max_answers: answers kept per client for repeated commands.
    max_queued_commands: waiting commands of all clients.
    max_noted_peers: unknown and faulty peers that are kept in a list, so that each is logged once.
    """

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
        """Return the seconds that a step may take on an engine with this estimate of its longest
        step. They are 4 times the estimate, as the next step may have longer contexts or fewer
        processors, and at least `progress_deadline_s`."""
        return min(max(self.progress_deadline_s, _STEP_SLACK * longest_step_s), MAX_SECONDS)

    @property
    def answer_grace_s(self) -> float:
        """Seconds after its deadline in which a request or command may still be answered. A commit
        decided at the deadline waits for the current step and the next one; the messages take up to
        5 s."""
        grace_s = max(self.abort_grace_s, self.commit_grace_s, 2 * self.progress_deadline_s) + 5.0
        return min(grace_s, MAX_SECONDS)


def num_ahead(max_requests: int) -> int:
    """Return how many requests may wait at an engine that runs up to `max_requests`, to begin when
    running requests end. All further requests wait in the coordinator."""
    return max(8, max_requests // 8)


class Timers:
    """One due time per key, in seconds. Of equal times, the time set first comes first. Each call
    takes amortized logarithmic time in the number of keys."""

    def __init__(self) -> None:
        self._entry_of_key: dict[TimerKey, tuple[float, int]] = {}
        self._heap: list[tuple[float, int, TimerKey]] = []  # the same entries and outdated ones
        self._num_set = 0

    def __len__(self) -> int:
        return len(self._entry_of_key)

    def __contains__(self, key: TimerKey) -> bool:
        return key in self._entry_of_key

    def set(self, key: TimerKey, due_at: float) -> None:
        """Set the key's due time, in place of an earlier one."""
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
        """Remove and return the key with the earliest time; None if no key is due at `now`."""
        due_at = self.first_due_at()
        if due_at is None or due_at > now:
            return None
        key = heapq.heappop(self._heap)[2]
        del self._entry_of_key[key]
        return key


@dataclass(slots=True)
class Counters:
    """Counts since the coordinator started.

    num_requests: accepted requests; each ends as one of num_completed, num_failed (by an engine or
    by the coordinator) and num_abandoned (its client has left). num_refused: requests that were not
    accepted. num_duplicates: submissions, tokens and replies that were known already. num_gaps:
    progress reports that were not kept, as tokens before them were missing or the log was full.
    num_stale: messages of attempts and sessions that have been replaced. num_unexpected: messages
    that the peer may not send, or that name an unknown request or command. num_unknown_peers:
    messages of peers before their handshake. num_undelivered: messages that no frame could carry or
    whose peer was unreachable. num_engines_lost: engines that were removed, for any reason.
    num_clients_lost: clients whose lease has expired.
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
    """The state that all parts of the core share.

    refused: returns the number of refused connections by reason. outbox: (identity, message) pairs
    to send; CoordinatorCore empties it. sessions: the peers' sessions by identity of their
    connection; Registry and Clients write it.
    """

    coordinator_id: bytes
    limits: CoordinatorLimits
    counters: Counters = field(default_factory=Counters)
    refused: Callable[[], Mapping[str, int]] = dict
    timers: Timers = field(default_factory=Timers)
    outbox: list[tuple[bytes, Message]] = field(default_factory=list)
    sessions: dict[bytes, Session] = field(default_factory=dict)

    def send(self, session: Session, message: Message) -> None:
        """Queue a message for this peer."""
        self.outbox.append((session.identity, message))
