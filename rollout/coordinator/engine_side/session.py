"""EngineSession: what the thread of an engine's socket does, in turns."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable

import zmq

from rollout.coordinator.dealer import CurveKeys, configure, dial, message_in
from rollout.coordinator.engine_side.lease import EngineLease
from rollout.coordinator.engine_side.queues import Inbox, Outbox
from rollout.coordinator.protocol.messages import (
    AbortRequest,
    AssignRequest,
    Command,
    Commit,
    Disconnect,
    EngineStatus,
    Heartbeat,
    Message,
    Nack,
    Prepare,
    Register,
    RegisterAck,
    ReplyAck,
    Rollback,
    encode,
    error_from,
)
from rollout.errors import ProtocolError, RolloutError

_logger = logging.getLogger(__name__)
_FOR_ENGINES = (AssignRequest, AbortRequest, Command, ReplyAck, Prepare, Commit, Rollback)
_BATCH = 256
_MIN_HEARTBEAT_S = 0.005
# How long a registration may be unanswered before it is sent again.
_REGISTER_TIMEOUT_S = 2.0
_RETRY_S = 0.5  # after a refusal


class EngineSession:
    """Registers the engine, keeps its lease, and moves messages between socket and queues.

    One thread calls it. Others may look at `num_sessions`, `is_registered`, `refusal`,
    `num_malformed` and the lease's end, and wait for `has_news`.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        address: str,
        *,
        curve: CurveKeys | None,
        inbox: Inbox,
        outbox: Outbox,
        registration: Callable[[], Register],
        status: Callable[[], EngineStatus],
        max_frame_bytes: int,
    ) -> None:
        self._context, self._address = context, address
        self._curve, self._max_frame_bytes = curve, max_frame_bytes
        self._inbox, self._outbox = inbox, outbox
        self._registration, self._status = registration, status
        self.lease = EngineLease()
        self.num_sessions = 0  # RegisterAcks put into the inbox
        self._coordinator_id: bytes | None = None  # of the latest session
        self.num_malformed = 0
        self.refusal: RolloutError | None = None
        self.has_news = threading.Event()  # a first answer to a registration
        self.is_registered = False
        self._registered_at: float | None = None  # when the registration under way was sent
        self._retry_at = math.inf
        self._heartbeat_s = _MIN_HEARTBEAT_S
        self._next_heartbeat = math.inf
        self._dial()

    def _dial(self) -> None:
        """Another connection is another socket: what comes over it answers what is sent over it."""
        self.socket = self._context.socket(zmq.DEALER)
        try:
            configure(self.socket, self._max_frame_bytes, self._curve)
            # Without a connection nothing is taken: a registration is made when somebody is there.
            self.socket.setsockopt(zmq.IMMEDIATE, 1)
            dial(self.socket, self._address)
        except BaseException:
            self.socket.close()
            raise

    # ---- what to wait for

    @property
    def events(self) -> int:
        """What of the socket a turn can use."""
        wants_out = self._registered_at is None or (
            self.is_registered and self._outbox.num_waiting > 0
        )
        return (zmq.POLLIN if self._inbox.has_room else 0) | (zmq.POLLOUT if wants_out else 0)

    @property
    def due_at(self) -> float:
        """When a turn is needed whatever happens."""
        if self.is_registered:
            return min(self._next_heartbeat, self.lease.until)
        return self._retry_at

    def turn(self, ready: int) -> None:
        """Use the events in `ready`, then do what is due."""
        if ready & zmq.POLLIN:
            self._receive()
        now = time.monotonic()
        if self.is_registered and now >= self.lease.until:
            self._leave("its lease ran out")
        elif not self.is_registered and now >= self._retry_at:
            self._leave("registering again")
        elif ready & zmq.POLLOUT and self._registered_at is None:
            self._register()
        if self.is_registered and now >= self._next_heartbeat:
            self._next_heartbeat = now + self._heartbeat_s
            sequence = self.lease.heartbeat(now)
            if self._send(encode(Heartbeat(sequence=sequence, status=self._status()))):
                self._outbox.mark(sequence)
        if self.is_registered and ready & zmq.POLLOUT:
            self._outbox.send_all(self._send)

    def finish(self, goodbye: Disconnect) -> None:
        """Send what waits and say goodbye."""
        if self.is_registered:
            self._outbox.send_all(self._send)
            self._send(encode(goodbye))
        self.lease.end()

    # ---- the session

    def _register(self) -> None:
        now = time.monotonic()
        if self._send(encode(self._registration(), self._max_frame_bytes)):
            self._registered_at, self._retry_at = now, now + _REGISTER_TIMEOUT_S

    def _enter(self, ack: RegisterAck) -> None:
        if self._registered_at is None or self.is_registered:
            return  # to nothing that was asked
        self.is_registered, self._retry_at = True, math.inf
        self._heartbeat_s = max(ack.heartbeat_s, _MIN_HEARTBEAT_S)
        self._next_heartbeat = time.monotonic()
        # In this order: the engine's thread may step under the lease once it has taken the message.
        self.num_sessions += 1
        if self._coordinator_id not in (None, ack.coordinator_id):
            self._outbox.begin_life(self.num_sessions)
        self._coordinator_id = ack.coordinator_id
        self.lease.begin(ack.lease_s, self._registered_at)
        self._inbox.put(ack)
        self.refusal = None
        self.has_news.set()
        _logger.info("engine registered at %s as rank %d", self._address, ack.rank)

    def _leave(self, why: str) -> None:
        """Begin anew, to register as soon as there is a connection."""
        _logger.info("engine at %s: %s", self._address, why)
        self.is_registered, self._registered_at, self._retry_at = False, None, math.inf
        self._outbox.rewind()
        self.socket.close(linger=0)
        self._dial()

    def _refused(self, error: RolloutError) -> None:
        self.lease.end()
        if self.is_registered:
            self._leave(f"the coordinator no longer knows it ({error})")
            return
        self.refusal = error
        self.has_news.set()
        self._retry_at = time.monotonic() + _RETRY_S
        _logger.warning("engine refused at %s: %s", self._address, error)

    # ---- the socket

    def _send(self, frame: bytes) -> bool:
        """Whether it was taken: not without a connection, nor while the coordinator is too slow."""
        try:
            self.socket.send(frame, zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def _receive(self) -> None:
        for _ in range(_BATCH):
            if not self._inbox.has_room:
                return
            try:
                frames = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                self._take(message_in(frames, self._max_frame_bytes))
            except ProtocolError as fault:
                self.num_malformed += 1
                if self.num_malformed == 1:
                    _logger.warning("coordinator %s sent garbage: %s", self._address, fault)

    def _take(self, message: Message) -> None:
        if isinstance(message, Heartbeat):
            self.lease.answered(message.sequence, time.monotonic())
            self._outbox.confirm(message.sequence)
        elif isinstance(message, RegisterAck):
            self._enter(message)
        elif isinstance(message, Nack) and message.command_id is None:
            self._refused(error_from(message))
        elif isinstance(message, Disconnect):
            self.lease.end()
            self._leave(f"the coordinator has gone: {message.reason}")
        elif isinstance(message, _FOR_ENGINES):
            self._inbox.put(message)
        else:
            raise ProtocolError(f"{type(message).__name__} is no message for an engine")
