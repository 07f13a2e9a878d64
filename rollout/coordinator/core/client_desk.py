"""ClientDesk: clients come, stay and go."""

from __future__ import annotations

import logging

from rollout.coordinator.core.books import Books
from rollout.coordinator.core.bounded_ids import BoundedIds
from rollout.coordinator.core.fleet import Fleet
from rollout.coordinator.core.request_desk import RequestDesk
from rollout.coordinator.core.sessions import ClientPeer
from rollout.coordinator.protocol.messages import (
    PROTOCOL_VERSION,
    Connect,
    ConnectAck,
    Heartbeat,
    nack_of,
)
from rollout.errors import RolloutError

logger = logging.getLogger(__name__)


class ClientDesk:
    """The only writer of client sessions."""

    def __init__(
        self,
        books: Books,
        desk: RequestDesk,
        fleet: Fleet,
        *,
        coordinator_id: bytes,
        data_parallel_size: int,
    ) -> None:
        self._books, self._desk, self._fleet = books, desk, fleet
        self._coordinator_id, self._data_parallel_size = coordinator_id, data_parallel_size

    def connect(self, identity: bytes, message: Connect, now: float) -> None:
        """Shake hands. A client that was there before finds all that is kept for it."""
        sessions, limits = self._books.sessions, self._books.limits
        here = sessions.peer(identity)
        if isinstance(here, ClientPeer) and here.client_id != message.client_id:
            self.part(here)
        client = sessions.clients.get(message.client_id)
        is_resumed = client is not None
        if client is None:
            if len(sessions.clients) >= limits.max_clients:
                refusal = RolloutError(f"{limits.max_clients} clients are there, no more are taken")
                self._books.outbox.append((identity, nack_of(None, refusal)))
                return
            client = ClientPeer(
                client_id=message.client_id,
                identity=identity,
                name=message.name,
                last_seen=now,
                answered=BoundedIds(limits.max_answered_ids),
            )
            sessions.add(client)
            self._books.timers.set(("client", client.client_id), now + limits.client_lease_s)
        else:
            sessions.move(client, identity)
            client.last_seen = now
        ack = ConnectAck(
            protocol_version=PROTOCOL_VERSION,
            coordinator_id=self._coordinator_id,
            state=self._fleet.state.name,
            data_parallel_size=self._data_parallel_size,
            weights_version=self._fleet.weights_version,
            lease_s=limits.client_lease_s,
            heartbeat_s=limits.heartbeat_s,
            max_requests=limits.max_client_requests,
            max_request_bytes=limits.max_client_request_bytes,
            is_resumed=is_resumed,
        )
        self._books.send(client, ack)
        self.tell_again(client)

    def heartbeat(self, client: ClientPeer, message: Heartbeat) -> None:
        """Answer. What could not be delivered is tried again now: not with each of its messages,
        as a slow client's acknowledgements would all bring all of it."""
        if client.has_missed:
            self.tell_again(client)
        self._books.send(client, Heartbeat(sequence=message.sequence))

    def tell_again(self, client: ClientPeer) -> None:
        """What it may have missed: answers to commands, replies, streamed tokens."""
        client.has_missed = False
        for answer in client.answers.values():
            if answer is not None:
                self._books.send(client, answer)
        self._desk.tell_all_again(client)

    def check(self, client_id: bytes, now: float) -> None:
        """Part with the client if its lease has run out, else look again when it may."""
        client = self._books.sessions.clients[client_id]
        lease_end = client.last_seen + self._books.limits.client_lease_s
        if now < lease_end:
            self._books.timers.set(("client", client_id), lease_end)
            return
        logger.warning("%s has vanished", client)
        self._books.counters.num_clients_lost += 1
        self.part(client)

    def part(self, client: ClientPeer) -> None:
        """It has gone: its requests are aborted, its replies forgotten."""
        self._desk.abandon_all(client)
        self._books.timers.cancel(("client", client.client_id))
        self._books.sessions.remove(client)
