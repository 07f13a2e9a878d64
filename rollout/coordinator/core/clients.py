"""Clients: connects clients, watches their leases, and sends undelivered messages again.

Used by `rollout.coordinator.core.core`. It makes and ends ClientSessions and sets their timers.
Messages go to the outbox of the Context.
"""

from __future__ import annotations

import logging

from rollout.coordinator.core.context import Context
from rollout.coordinator.core.fleet import Fleet
from rollout.coordinator.core.request_lifecycle import RequestLifecycle
from rollout.coordinator.core.request_table import ClientSession, Recent
from rollout.coordinator.protocol.messages import (
    PROTOCOL_VERSION,
    Connect,
    ConnectAck,
    Heartbeat,
    nack_of,
)
from rollout.errors import RolloutError

logger = logging.getLogger(__name__)


class Clients:
    """Makes and ends the sessions of clients. `sessions` holds them by client id."""

    def __init__(
        self,
        context: Context,
        requests: RequestLifecycle,
        fleet: Fleet,
        *,
        data_parallel_size: int,
    ) -> None:
        self._context, self._requests, self._fleet = context, requests, fleet
        self._data_parallel_size = data_parallel_size
        self.sessions: dict[bytes, ClientSession] = {}

    def connect(self, identity: bytes, message: Connect, now: float) -> None:
        """Accept a client, or refuse it if `max_clients` are connected. A client that reconnects
        gets all messages that it has missed. `identity` names its connection."""
        context, limits = self._context, self._context.limits
        here = context.sessions.get(identity)
        if isinstance(here, ClientSession) and here.client_id != message.client_id:
            self.remove(here)
        client = self.sessions.get(message.client_id)
        is_resumed = client is not None
        if client is None and len(self.sessions) >= limits.max_clients:
            refusal = RolloutError(
                f"max_clients={limits.max_clients} clients are connected; try again later"
            )
            context.outbox.append((identity, nack_of(None, refusal)))
            return
        if client is None:
            client = ClientSession(
                *(message.client_id, identity, message.name, now), Recent(limits.max_answered_ids)
            )
            self.sessions[client.client_id] = client
            context.timers.set(("client", client.client_id), now + limits.client_lease_s)
        elif context.sessions.get(client.identity) is client:
            del context.sessions[client.identity]
        if client.identity != identity:
            client.move(identity)
        client.renew_lease(now)
        context.sessions[identity] = client
        ack = ConnectAck(
            coordinator_id=context.coordinator_id,
            protocol_version=PROTOCOL_VERSION,
            state=self._fleet.state.name,
            data_parallel_size=self._data_parallel_size,
            weights_version=self._fleet.weights_version,
            lease_s=limits.client_lease_s,
            heartbeat_s=limits.heartbeat_s,
            answer_grace_s=limits.answer_grace_s,
            max_requests=limits.max_client_requests,
            max_request_bytes=limits.max_client_request_bytes,
            is_resumed=is_resumed,
        )
        context.send(client, ack)
        self._resend_missed(client)

    def heartbeat(self, client: ClientSession, message: Heartbeat, now: float) -> None:
        """Answer a client's heartbeat, and send undelivered messages again."""
        # Acknowledgements do not resend: a slow client would get all messages with each of them.
        self._resend_missed(client)
        self._context.send(client, Heartbeat(sequence=message.sequence))

    def _resend_missed(self, client: ClientSession) -> None:
        answers, tokens = client.take_missed()
        for answer in answers:
            self._context.send(client, answer)
        for request_id, offset in tokens.items():
            self._requests.resend(client, request_id, offset)

    def check(self, client_id: bytes, now: float) -> None:
        """Remove a client whose lease has run out. Otherwise set the timer to the end of the
        lease."""
        client = self.sessions[client_id]
        lease_end = client.last_seen + self._context.limits.client_lease_s
        if now < lease_end:
            self._context.timers.set(("client", client_id), lease_end)
            return
        logger.debug("%s sent no heartbeat within its lease", client)
        self._context.counters.num_clients_lost += 1
        self.remove(client)

    def remove(self, client: ClientSession) -> None:
        """End the session of a client, abort its unfinished requests, and drop its replies."""
        client.leave()
        self._requests.abandon_all(client)
        self._context.timers.discard(("client", client.client_id))
        del self.sessions[client.client_id]
        if self._context.sessions.get(client.identity) is client:
            del self._context.sessions[client.identity]
