"""Context: limits, timers, counters, sessions and the outbox, which all parts of the core share.

Each part of the core appends to the outbox, sets timers and counts; CoordinatorCore empties them.
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

    client_lease_s, engine_lease_s: a peer that sends nothing for this time has vanished.
    heartbeat_s: how often peers send a heartbeat.
    probe_interval_s: how often each engine is sent a heartbeat; sending fails if it was killed.
    progress_deadline_s: an engine that has work and ends no step for this time is removed, unless a
    step of its model may take longer: see `step_deadline_s`.
    orphan_deadline_s: how long requests wait while there is no engine at all.
    push_wait_s: how long requests wait while no engine has the fleet's weights, which were sent by
    a transport that keeps no copy, so that the trainer has to push again.
    command_deadline_s: the deadline of commands that name none.
    max_lost_attempts: a request fails when this many engines have failed while they ran it.
    abort_grace_s: how long an aborted request waits for the record of its engine.
    commit_grace_s: the least time that an engine has for a commit once it is decided. An engine
    with work has longer, as long as no step takes longer than `step_deadline_s`.
    report_interval_tokens: most tokens of a request between two reports of its engine.
    max_clients, max_engines: further ones are refused.
    max_client_requests: unfinished requests of one client; a client holds the others back.
    max_requests: unfinished requests and kept replies of all clients.
    max_client_request_bytes: prompts and parameters of one client's unfinished requests.
    max_kept_reply_bytes: kept replies of one client. Beyond one of these four, new requests are
    refused with a transient error.
    max_token_log_bytes: reported tokens of all requests. Beyond it, a request that is not streamed
    resumes from an earlier token if its engine fails.
    max_answered_ids: acknowledged requests per client by which a repeated submission is recognized.
    max_answers: answers kept per client for repeated commands.
    max_queued_commands: waiting commands of all clients.
    max_noted_peers: unknown and faulty peers that are remembered; each is logged once.
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
        """Return how long an engine may take for a step: several times its longest one so far, as
        the next step may have longer contexts or fewer processors, and at least
        `progress_deadline_s`."""
        return min(max(self.progress_deadline_s, _STEP_SLACK * longest_step_s), MAX_SECONDS)

    @property
    def answer_grace_s(self) -> float:
        """How long after its deadline a request or command may still be answered, in seconds. A
        commit decided at the deadline waits for the current step and the next one; 5 s are for the
        messages."""
        grace_s = max(self.abort_grace_s, self.commit_grace_s, 2 * self.progress_deadline_s) + 5.0
        return min(grace_s, MAX_SECONDS)


def num_ahead(max_requests: int) -> int:
    """Return how many requests wait at an engine that runs up to `max_requests`, ready to begin
    when running ones end. All further requests wait in the coordinator."""
    return max(8, max_requests // 8)


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
    by the coordinator) and num_abandoned (its client has left). num_refused: requests that were not
    accepted. num_duplicates: submissions, tokens and replies that were known already. num_gaps:
    progress that was not kept: tokens were missing before it, or the log was full. num_stale:
    messages of attempts and sessions that have been replaced. num_unexpected: messages that the
    peer may not send, or that name nothing known. num_undelivered: messages to unreachable peers.
    num_engines_lost: engines that were removed, for whatever reason. num_clients_lost: clients
    whose lease has run out.
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

    refused: returns the number of refused connections by reason. outbox: (identity, message) to be
    sent; the core empties it. sessions: by identity; Registry and Clients write it.
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
