"""Who the coordinator talks with: clients and engines, by their ids and socket identities."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field

from rollout.coordinator.core.bounded_ids import BoundedIds
from rollout.coordinator.protocol.messages import Ack, Attempt, EngineStatus, Nack


@dataclass(slots=True, eq=False)
class ClientPeer:
    """One client, until its lease runs out. `identity` is where it is reached now.

    server_ids: of its unfinished requests and kept replies, by its own ids. request_bytes: of the
    former, kept_bytes: of the latter. answered: its ids of acknowledged requests. answers: by
    command id; None while the command waits or runs. has_missed: something could not be
    delivered, so it gets everything again with its next heartbeat.
    """

    client_id: bytes
    identity: bytes
    name: str
    last_seen: float
    answered: BoundedIds[int]
    server_ids: dict[int, int] = field(default_factory=dict)
    request_bytes: int = 0
    kept_bytes: int = 0
    answers: OrderedDict[int, Ack | Nack | None] = field(default_factory=OrderedDict)
    has_missed: bool = False

    def __str__(self) -> str:
        return f"client {self.client_id.hex()[:8]} {self.name!r}"


@dataclass(slots=True, eq=False)
class EnginePeer:
    """One registered engine. It gets work and commands once it `is_ready`.

    progress_at: when its step count last rose, or it had no reason to. server_ids: the requests
    assigned to it, oldest first. ended: attempts whose end is safe here, not yet told to it.
    told: name of the state and weights version it was told to have when it registered. is_awaited:
    a command waits for its answer, which has a deadline of its own.
    """

    engine_id: bytes
    identity: bytes
    rank: int
    weights_version: int
    weights_checksum: str
    max_requests: int
    last_seen: float
    progress_at: float
    status: EngineStatus | None = None
    is_ready: bool = False
    is_awaited: bool = False
    told: tuple[str, int] | None = None
    server_ids: dict[int, None] = field(default_factory=dict)
    ended: list[Attempt] = field(default_factory=list)

    def __str__(self) -> str:
        return f"rank {self.rank} (engine {self.engine_id.hex()[:8]})"


Peer = ClientPeer | EnginePeer


class Sessions:
    """All peers that have shaken hands. Remembers the ranks of the `max_ranks` latest engines."""

    def __init__(self, max_ranks: int) -> None:
        self._peers: dict[bytes, Peer] = {}
        self.clients: dict[bytes, ClientPeer] = {}
        self.engines: dict[bytes, EnginePeer] = {}
        self._rank_of_engine: OrderedDict[bytes, int] = OrderedDict()
        self._max_ranks = max_ranks

    def peer(self, identity: bytes) -> Peer | None:
        return self._peers.get(identity)

    def add(self, peer: Peer) -> None:
        """Its id must be free; whoever had its identity is no longer reached there."""
        self._peers[peer.identity] = peer
        if isinstance(peer, ClientPeer):
            self.clients[peer.client_id] = peer
        else:
            self.engines[peer.engine_id] = peer

    def remove(self, peer: Peer) -> None:
        """Its messages are those of a stranger from now on."""
        if self._peers.get(peer.identity) is peer:
            del self._peers[peer.identity]
        if isinstance(peer, ClientPeer):
            del self.clients[peer.client_id]
        else:
            del self.engines[peer.engine_id]

    def move(self, client: ClientPeer, identity: bytes) -> None:
        """The client is reached at another identity now."""
        if self._peers.get(client.identity) is client:
            del self._peers[client.identity]
        client.identity = identity
        self._peers[identity] = client

    def identities(self) -> list[bytes]:
        return list(self._peers)

    def ready_engines(self) -> Iterator[EnginePeer]:
        """In the order in which they joined."""
        return (engine for engine in self.engines.values() if engine.is_ready)

    def forgive(self, seconds: float) -> None:
        """Time in which nobody could be heard."""
        for client in self.clients.values():
            client.last_seen += seconds
        for engine in self.engines.values():
            engine.last_seen += seconds
            engine.progress_at += seconds

    def assign_rank(self, engine_id: bytes) -> int:
        """The engine's earlier rank if nobody has it now, else the lowest that nobody has."""
        taken = {engine.rank for engine in self.engines.values()}
        rank = self._rank_of_engine.pop(engine_id, -1)
        if rank < 0 or rank in taken:
            rank = next(rank for rank in range(len(taken) + 1) if rank not in taken)
        self._rank_of_engine[engine_id] = rank
        if len(self._rank_of_engine) > self._max_ranks:
            self._rank_of_engine.popitem(last=False)
        return rank
