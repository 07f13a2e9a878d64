"""Durations and bounds that a coordinator and its engines keep to."""

from __future__ import annotations

from dataclasses import dataclass, fields

from rollout.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class CoordinatorLimits:
    """Raises ConfigError unless each is positive, and a heartbeat fits twice into each lease.

    client_lease_s, engine_lease_s: a peer unheard of for so long has gone.
    heartbeat_s: how often peers should send one.
    probe_interval_s: how often each engine is sent something, which fails if it was killed.
    progress_deadline_s: a step count that stands still for so long, with work to do, is death.
    orphan_deadline_s: how long requests wait while there is no engine at all.
    command_deadline_s: of commands that name none.
    max_lost_attempts: a request fails when so many engines were lost while they ran it.
    abort_grace_s: how long an aborted request waits for its engine's record.
    commit_grace_s: least time engines have for a commit once it is decided. One that is amid work
    has longer: it may make steps, none of which takes longer than progress_deadline_s.
    report_interval_tokens: most tokens of a request between two reports of its engine.
    max_client_requests: unfinished requests of one client; a client holds the others back.
    max_requests: unfinished requests and kept replies of all clients.
    max_client_request_bytes: of one client's unfinished requests, their prompts above all.
    max_kept_reply_bytes: of one client. Beyond these three, new requests are refused for now.
    max_token_log_bytes: of all tokens reported so far. Beyond it, requests that nobody streams are
    resumed from an earlier token if their engine is lost.
    max_answered_ids: acknowledged requests of a client that a late repetition is known by.
    max_answers: answered commands of a client that a repetition is answered from.
    max_queued_commands: of all clients.
    max_noted_peers: strangers and faulty peers remembered, so that each is logged once.
    """

    client_lease_s: float = 30.0
    engine_lease_s: float = 10.0
    heartbeat_s: float = 1.0
    probe_interval_s: float = 0.25
    progress_deadline_s: float = 60.0
    orphan_deadline_s: float = 1800.0
    command_deadline_s: float = 60.0
    max_lost_attempts: int = 3
    abort_grace_s: float = 10.0
    commit_grace_s: float = 10.0
    report_interval_tokens: int = 16
    max_clients: int = 1024
    max_engines: int = 1024
    max_requests: int = 2**18
    max_client_requests: int = 2**16
    max_client_request_bytes: int = 2**30
    max_kept_reply_bytes: int = 2**30
    max_token_log_bytes: int = 2**30
    max_answered_ids: int = 2**16
    max_answers: int = 256
    max_queued_commands: int = 256
    max_noted_peers: int = 1024

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not value > 0:
                raise ConfigError(f"{field.name}={value!r} must be above 0")
        for name in ("client_lease_s", "engine_lease_s"):
            if getattr(self, name) < 2 * self.heartbeat_s:
                raise ConfigError(
                    f"{name}={getattr(self, name)} must be at least twice "
                    f"heartbeat_s={self.heartbeat_s}"
                )

    @property
    def answer_grace_s(self) -> float:
        """How long after its deadline a request or command may still be answered: a commit that is
        decided just then waits for the step under way and the next one. With time for the way."""
        return max(self.abort_grace_s, self.commit_grace_s, 2 * self.progress_deadline_s) + 5.0


def num_ahead(max_requests: int) -> int:
    """Requests that wait at an engine which runs up to `max_requests`, so that a step that ends
    requests finds others there. All further ones wait in the coordinator, for any engine."""
    return max(8, max_requests // 8)
