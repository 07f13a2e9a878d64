"""Session: a peer that has shaken hands, a client or an engine."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from rollout.coordinator.protocol.messages import (
    Ack,
    EngineStatus,
    Nack,
)

K = TypeVar("K", bound=Hashable)


class RecentIds(Generic[K]):
    """At most `max_ids` ids; beyond, those added first are forgotten."""

    __slots__ = ("_ids", "_max_ids")

    def __init__(self, max_ids: int) -> None:
        # Not a dict: to find its first key it passes over all that were deleted before.
        self._ids: OrderedDict[K, None] = OrderedDict()
        self._max_ids = max_ids

    def __contains__(self, key: K) -> bool:
        return key in self._ids

    def __len__(self) -> int:
        return len(self._ids)

    def add(self, key: K) -> bool:
        """Add `key`; returns whether it is new, as far as is remembered."""
        if key in self._ids:
            return False
        self._ids[key] = None
        if len(self._ids) > self._max_ids:
            self._ids.popitem(last=False)
        return True


@dataclass(slots=True, eq=False)
class ClientSession:
    """One client, until its lease runs out. `identity` is where it is reached now.

    server_ids: of its unfinished requests and kept replies, by its own ids. num_unfinished: of the
    former. request_bytes: of the former, kept_bytes: of the latter. answered: its ids of
    acknowledged requests. answers: by command id; None while the command waits or runs.
    missed_tokens: what could not be delivered, by its own request id and offset: the reply if there
    is one by now. missed_answers: by command id.
    """

    client_id: bytes
    identity: bytes
    name: str
    last_seen: float
    answered: RecentIds[int]
    server_ids: dict[int, int] = field(default_factory=dict)
    num_unfinished: int = 0
    request_bytes: int = 0
    kept_bytes: int = 0
    answers: OrderedDict[int, Ack | Nack | None] = field(default_factory=OrderedDict)
    missed_tokens: dict[int, int] = field(default_factory=dict)
    missed_answers: dict[int, None] = field(default_factory=dict)
    has_left: bool = False

    def __str__(self) -> str:
        return f"client {self.client_id.hex()[:8]} {self.name!r}"


@dataclass(slots=True, eq=False)
class EngineSession:
    """One registered engine. It gets work and commands once it `is_ready`.

    max_held: requests that it holds at most. num_granted: requests that it accepts, num_assigned:
    those that it was sent, both since it registered. progress_at: when its step count last rose,
    or it had no reason to. server_ids: the requests assigned to it, oldest first. last_chance_id:
    the request that no other such request may run beside. expected: name of the state and weights
    version that it was given when it registered. num_awaited: commands that wait for its answer,
    each with a deadline of its own.
    """

    engine_id: bytes
    identity: bytes
    rank: int
    weights_version: int
    weights_checksum: str
    max_held: int
    last_seen: float
    progress_at: float
    num_granted: int = 0
    num_assigned: int = 0
    status: EngineStatus | None = None
    is_ready: bool = False
    num_awaited: int = 0
    expected: tuple[str, int] | None = None
    server_ids: dict[int, None] = field(default_factory=dict)
    last_chance_id: int | None = None

    @property
    def room(self) -> int:
        """How many requests it accepts now."""
        granted = self.num_granted - self.num_assigned
        return min(granted, self.max_held - len(self.server_ids))

    def __str__(self) -> str:
        return f"rank {self.rank} (engine {self.engine_id.hex()[:8]})"


Session = ClientSession | EngineSession
