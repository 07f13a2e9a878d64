"""Context: what all parts of the coordinator's logic read and write."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Literal

from rollout.coordinator.core.indexed_heap import IndexedHeap
from rollout.coordinator.core.limits import CoordinatorLimits
from rollout.coordinator.core.sessions import EngineSession, Session
from rollout.coordinator.protocol.messages import (
    AbortRequest,
    Attempt,
    Message,
    ReplyAck,
)

TimerKey = (
    tuple[Literal["client", "engine"], bytes]
    | tuple[Literal["deadline", "orphan", "grace", "command", "probe"], int]
)


@dataclass(slots=True)
class Counters:
    """Since the coordinator was made.

    num_requests: taken; each ends as one of num_completed, num_failed (engines' word or ours) and
    num_abandoned (its client has gone). num_refused: not taken. num_duplicates: submits, tokens
    and ends that were known already. num_gaps: progress that did not join on, or had no memory.
    num_stale: of attempts that count no more. num_unexpected: messages that the peer may not send
    or that name nothing known. num_undelivered: the peer could not be reached.
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

    def as_metrics(self, prefix: str = "coordinator/") -> dict[str, int]:
        """The numbers, under flat names for a MetricsWriter."""
        return {f"{prefix}{name}": value for name, value in asdict(self).items()}


@dataclass(slots=True)
class Context:
    """`outbox`: to whom, what; emptied by the core's owner. Acknowledgements and aborts for engines
    wait until the end of the turn, so that each engine gets one message of each kind."""

    limits: CoordinatorLimits
    counters: Counters = field(default_factory=Counters)
    timers: IndexedHeap[TimerKey] = field(default_factory=IndexedHeap)
    outbox: list[tuple[bytes, Message]] = field(default_factory=list)
    _acknowledged: dict[bytes, list[Attempt]] = field(default_factory=dict)  # by identity
    _aborted: dict[bytes, list[Attempt]] = field(default_factory=dict)

    def send(self, session: Session, message: Message) -> None:
        self.outbox.append((session.identity, message))

    def acknowledge(self, engine: EngineSession, attempt: Attempt) -> None:
        """Let the engine forget the end of this attempt."""
        self._acknowledged.setdefault(engine.identity, []).append(attempt)

    def abort(self, engine: EngineSession, attempt: Attempt) -> None:
        """Let the engine end this attempt."""
        self._aborted.setdefault(engine.identity, []).append(attempt)

    def end_turn(self) -> None:
        """Put what has waited for the end of the turn into the outbox."""
        for identity, attempts in self._acknowledged.items():
            self.outbox.append((identity, ReplyAck(attempts=tuple(attempts))))
        for identity, attempts in self._aborted.items():
            self.outbox.append((identity, AbortRequest(attempts=tuple(attempts))))
        self._acknowledged, self._aborted = {}, {}

    def forget_engine(self, engine: EngineSession) -> None:
        """Nothing more is for this session."""
        self._acknowledged.pop(engine.identity, None)
        self._aborted.pop(engine.identity, None)
