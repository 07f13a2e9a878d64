"""Books: what the parts of the coordinator's logic share."""

from __future__ import annotations

from dataclasses import InitVar, dataclass, field
from typing import Literal

from rollout.coordinator.core.counters import Counters
from rollout.coordinator.core.limits import CoordinatorLimits
from rollout.coordinator.core.request_table import RequestTable
from rollout.coordinator.core.sessions import Peer, Sessions
from rollout.coordinator.core.text_queue import TextQueue
from rollout.coordinator.core.timers import Timers
from rollout.coordinator.protocol.messages import Message

TimerKey = (
    tuple[Literal["client", "engine"], bytes]
    | tuple[Literal["deadline", "orphan", "grace", "command"], int]
)


@dataclass(slots=True)
class Books:
    """One coordinator's tables, and what it has to say: `outbox` to peers, `text_jobs` to whoever
    tokenizes. Both are emptied by the owner of the socket. `first_id`: of its requests."""

    limits: CoordinatorLimits
    first_id: InitVar[int]
    counters: Counters = field(default_factory=Counters)
    timers: Timers[TimerKey] = field(default_factory=Timers)
    requests: RequestTable = field(init=False)
    sessions: Sessions = field(init=False)
    outbox: list[tuple[bytes, Message]] = field(default_factory=list)
    text_jobs: TextQueue = field(default_factory=TextQueue)

    def __post_init__(self, first_id: int) -> None:
        self.requests = RequestTable(first_id)
        self.sessions = Sessions(max_ranks=self.limits.max_engines)

    def send(self, peer: Peer, message: Message) -> None:
        self.outbox.append((peer.identity, message))
