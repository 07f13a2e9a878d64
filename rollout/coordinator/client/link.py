"""CoordinatorLink: a client's session with the coordinator, kept alive and begun again."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any

import zmq
import zmq.asyncio

from rollout.coordinator.dealer import (
    LINGER_MS,
    CoordinatorLostError,
    CurveKeys,
    configure,
    dial,
    message_in,
    redial,
)
from rollout.coordinator.protocol.headers import PROTOCOL_VERSION
from rollout.coordinator.protocol.messages import (
    DEFAULT_MAX_FRAME_BYTES,
    Connect,
    ConnectAck,
    Disconnect,
    Heartbeat,
    Message,
    Nack,
    ProtocolVersionError,
    encode,
    error_from,
)
from rollout.errors import ProtocolError, RolloutError

_logger = logging.getLogger(__name__)
_BATCH = 256  # messages taken before others of the event loop have their turn
_MIN_HEARTBEAT_S = 0.005


class CoordinatorLink:
    """Owns a client's socket and its two tasks. Lives in one event loop.

    on_messages: called with each batch that is not about the session itself. on_welcome: called
    after each greeting but the first; True if the coordinator cannot have forgotten this client.
    on_lost: called once when the coordinator is given up, which is after twice its lease of
    silence, or when it says goodbye; the link goes on dialling.
    """

    def __init__(
        self,
        address: str,
        greeting: Connect,
        *,
        on_messages: Callable[[list[Message]], None],
        on_welcome: Callable[[bool], None],
        on_lost: Callable[[CoordinatorLostError], None],
        curve: CurveKeys | None = None,
        max_frame_bytes: int = DEFAULT_MAX_FRAME_BYTES,
    ) -> None:
        self._address, self._max_frame_bytes = address, max_frame_bytes
        self._greeting = encode(greeting)
        self._on_messages, self._on_welcome, self._on_lost = on_messages, on_welcome, on_lost
        self.context = zmq.asyncio.Context()
        self.socket: zmq.asyncio.Socket = self.context.socket(zmq.DEALER)
        configure(self.socket, max_frame_bytes, curve)
        # What is pending bounds what is sent; a coordinator that stands still is given up in time.
        self.socket.setsockopt(zmq.SNDHWM, 0)
        self.listener_task: asyncio.Task[None] | None = None
        self._heartbeat_task: asyncio.Task[None] | None = None
        self._first_welcome: asyncio.Future[ConnectAck] | None = None
        self.coordinator: ConnectAck | None = None
        self.is_greeted = False
        self.lost: CoordinatorLostError | None = None
        self.num_malformed = 0
        self._refusal: RolloutError | None = None
        # Seconds without a word while this process was awake; and how many at the last greeting.
        self._unheard_s = self._unheard_before_greeting_s = 0.0
        self._num_heartbeats = 0
        self._sent_at: dict[int, float] = {}  # heartbeats not answered yet
        self._greeted_at = self._confirmed_at = 0.0  # when what was answered last had been sent

    # ---- opening and closing

    async def open(self, timeout_s: float) -> ConnectAck:
        """Greet. Raises CoordinatorLostError if nobody answers, or the coordinator's refusal."""
        loop = asyncio.get_running_loop()
        self._first_welcome = loop.create_future()
        dial(self.socket, self._address)
        self.listener_task = loop.create_task(self._listen(), name="inference-client-listener")
        self._greet()
        try:
            welcome = await asyncio.wait_for(self._first_welcome, timeout_s)
        except asyncio.TimeoutError as fault:
            raise CoordinatorLostError(
                f"no coordinator answers at {self._address} after {timeout_s:g} s; is it running, "
                "and is this its address?"
            ) from fault
        self._heartbeat_task = loop.create_task(self._keep_alive(), name="inference-client-alive")
        return welcome

    def close(self, reason: str) -> list[asyncio.Task[None]]:
        """Say goodbye, cancel the tasks and close the socket. Returns the tasks, to be awaited."""
        tasks = [task for task in (self.listener_task, self._heartbeat_task) if task is not None]
        if self.is_greeted:
            # Past asyncio's half of the socket, whose loop may be closed.
            plain: zmq.Socket[bytes] = zmq.Socket.shadow(self.socket.underlying)
            plain.send(encode(Disconnect(reason=reason)), zmq.NOBLOCK)
        self.is_greeted = False
        for task in tasks:
            if not task.get_loop().is_closed():
                task.cancel()
        self.socket.close(linger=LINGER_MS)
        self.context.term()
        return tasks

    # ---- sending

    def send(self, message: Message) -> None:
        """Send, if the coordinator is known to listen; else the next welcome is the time for it.

        Raises ProtocolError if `message` cannot be sent at all.
        """
        frame = encode(message, self._max_frame_bytes)
        if self.is_greeted:
            self._send_frame(frame)

    def _send_frame(self, frame: bytes) -> None:
        # Queued at once: there is no limit, and no connection needed.
        sent: Any = self.socket.send(frame, zmq.NOBLOCK)
        sent.result()

    def _greet(self) -> None:
        self._greeted_at = time.monotonic()
        self._send_frame(self._greeting)

    def _greet_again(self, reason: str) -> None:
        _logger.info("coordinator %s: %s, greeting it again", self._address, reason)
        self.is_greeted = False
        self._refusal = None
        self._sent_at.clear()
        self._unheard_before_greeting_s = self._unheard_s
        redial(self.socket, self._address)
        self._greet()

    # ---- receiving

    async def _listen(self) -> None:
        try:
            while True:
                batch = [await self.socket.recv_multipart()]
                while len(batch) < _BATCH:
                    received: Any = self.socket.recv_multipart(zmq.NOBLOCK)
                    if isinstance(received.exception(), zmq.Again):
                        break
                    batch.append(received.result())
                self._take(batch)
                await asyncio.sleep(0)
        except Exception as fault:
            _logger.exception("the client's listener failed")
            self._lose(f"this client failed: {fault!r}")
            raise

    def _take(self, batch: list[list[bytes]]) -> None:
        messages: list[Message] = []
        for frames in batch:
            try:
                message = message_in(frames, self._max_frame_bytes)
            except ProtocolError as fault:
                self.num_malformed += 1
                if self.num_malformed == 1:
                    _logger.warning("coordinator %s sent garbage: %s", self._address, fault)
                continue
            if isinstance(message, Nack) and message.command_id is None:
                self._refuse(error_from(message))
                continue
            self._unheard_s = 0.0
            if isinstance(message, Heartbeat):
                self._confirm(message.sequence)
            elif isinstance(message, ConnectAck):
                self._welcome(message)
            elif isinstance(message, Disconnect):
                # What was said before the goodbye is taken before it ends all that is pending.
                self._on_messages(messages)
                messages = []
                # No alarm: a goodbye is mostly the answer to a shutdown.
                self._lose(f"it has gone: {message.reason or 'no reason given'}", logging.INFO)
                self._greet_again("it has gone")
            else:
                messages.append(message)
        self._on_messages(messages)

    def _refuse(self, error: RolloutError) -> None:
        if self._first_welcome is not None and not self._first_welcome.done():
            self._first_welcome.set_exception(error)
        elif self.is_greeted:
            self._greet_again(f"it no longer knows this client ({error})")
        else:
            self._refusal = error

    def _welcome(self, ack: ConnectAck) -> None:
        if ack.protocol_version != PROTOCOL_VERSION:
            self._refuse(
                ProtocolVersionError(
                    f"the coordinator speaks protocol {ack.protocol_version}, this process "
                    f"{PROTOCOL_VERSION}"
                )
            )
            return
        before, self.coordinator = self.coordinator, ack
        was_greeted, self.is_greeted = self.is_greeted, True
        self.lost, now = None, time.monotonic()
        if before is not None and not was_greeted:
            # Heard of within its lease, so its requests and commands are still known there.
            is_within_lease = now - self._confirmed_at < before.lease_s
            self._on_welcome(is_within_lease and ack.coordinator_id == before.coordinator_id)
        self._confirmed_at = self._greeted_at
        if self._first_welcome is not None and not self._first_welcome.done():
            self._first_welcome.set_result(ack)

    def _confirm(self, sequence: int) -> None:
        sent_at = self._sent_at.get(sequence)
        if sent_at is not None:
            self._confirmed_at = sent_at
            self._sent_at = {s: at for s, at in self._sent_at.items() if s > sequence}

    # ---- liveness

    async def _keep_alive(self) -> None:
        last_tick = time.monotonic()
        while self.coordinator is not None:
            heartbeat_s = max(self.coordinator.heartbeat_s, _MIN_HEARTBEAT_S)
            lease_s = self.coordinator.lease_s
            await asyncio.sleep(heartbeat_s)
            now = time.monotonic()
            # A loop that was blocked, or a process that was stopped, could hear nobody.
            self._unheard_s += min(now - last_tick, 2 * heartbeat_s)
            last_tick = now
            if self.lost is None and self._unheard_s > 2 * lease_s:
                self._lose(f"silent for {self._unheard_s:.3g} s")
            if self._is_greeting_due(lease_s):
                self._greet_again(f"silent for {self._unheard_s:.3g} s")
            elif self.is_greeted:
                self._num_heartbeats += 1
                self._sent_at[self._num_heartbeats] = now
                self.send(Heartbeat(sequence=self._num_heartbeats))

    def _is_greeting_due(self, lease_s: float) -> bool:
        if self.is_greeted:
            return self._unheard_s > lease_s
        waited_s = self._unheard_s - self._unheard_before_greeting_s
        return self._refusal is not None or waited_s > lease_s

    def _lose(self, reason: str, level: int = logging.WARNING) -> None:
        if self.lost is not None:
            return
        because = "" if self._refusal is None else f"; its last word was: {self._refusal}"
        self.lost = CoordinatorLostError(f"the coordinator at {self._address}: {reason}{because}")
        _logger.log(level, "%s", self.lost)
        self._on_lost(self.lost)
