"""ScriptedRouter: a coordinator's ROUTER in a thread, which answers as a test says.

Like a real coordinator it refuses peers that have not sent a handshake since it began.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import zmq

from rollout.coordinator.protocol.codec import decode, encode, frames_in
from rollout.coordinator.protocol.messages import (
    PROTOCOL_VERSION,
    Connect,
    ConnectAck,
    Heartbeat,
    Register,
    RegisterAck,
    nack_of,
)
from rollout.errors import ProtocolError
from rollout.wire import Message

# What to answer a message with: messages, or frames as they are.
Answers = Sequence[Message | bytes] | None
Script = Callable[[Message], Answers]
M = TypeVar("M")

BOUND_S = 20.0
LEASE_S, HEARTBEAT_S = 1.0, 0.05
COORDINATOR_ID = bytes(range(16))


def connect_ack(**changes: object) -> ConnectAck:
    """Answer like a coordinator that still knows its clients."""
    fields = {
        "protocol_version": PROTOCOL_VERSION,
        "coordinator_id": COORDINATOR_ID,
        "state": "RUNNING",
        "data_parallel_size": 2,
        "weights_version": 3,
        "lease_s": 60.0,
        "heartbeat_s": HEARTBEAT_S,
        "answer_grace_s": 15.0,
        "is_resumed": True,
    }
    return ConnectAck(**{**fields, **changes})


def register_ack(**changes: object) -> RegisterAck:
    """With a lease that no slow machine outlasts."""
    fields = {
        "coordinator_id": COORDINATOR_ID,
        "state": "RUNNING",
        "lease_s": 600.0,
        "heartbeat_s": HEARTBEAT_S,
        "report_interval_tokens": 1,
        "weights_version": 0,
    }
    return RegisterAck(**{**fields, **changes})


def polite(message: Message) -> Answers:
    """Answer handshakes and heartbeats, and no other message."""
    if isinstance(message, Connect):
        return [connect_ack()]
    if isinstance(message, Register):
        return [register_ack()]
    if isinstance(message, Heartbeat):
        return [Heartbeat(sequence=message.sequence)]
    return None


def politely(script: Script) -> Script:
    """`script`, and `polite` where it returns None."""

    def both(message: Message) -> Answers:
        answers = script(message)
        return polite(message) if answers is None else answers

    return both


class ScriptedRouter:
    """`script` may be replaced at any time. `received`: all messages, in order."""

    def __init__(self, script: Script = polite) -> None:
        self.script = script
        self.received: list[Message] = []
        self.port = self.num_frames = 0
        self._actions: queue.Queue[Callable[[], None]] = queue.Queue()
        self._latest = b""
        self._known: set[bytes] = set()
        self._news = threading.Condition()
        self._context = zmq.Context()
        self._router: zmq.Socket | None = None
        self._is_done = False
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> ScriptedRouter:
        self._thread.start()
        self.come_back()
        return self

    def __exit__(self, *exception: object) -> None:
        self._is_done = True
        self._thread.join(BOUND_S)
        assert not self._thread.is_alive()
        self._context.term()

    @property
    def address(self) -> str:
        return f"tcp://127.0.0.1:{self.port}"

    # ---- for tests

    def send(self, *messages: Message | bytes) -> None:
        """To the peer of the last message."""
        self._do(lambda: self._send(self._latest, messages))

    def send_frames(self, *frames: bytes) -> None:
        """One message of several frames."""
        self._do(lambda: self._router.send_multipart([self._latest, *frames]))

    def vanish(self) -> None:
        self._do(lambda: self._router.close())

    def come_back(self) -> None:
        """With another socket on the same port; it knows no peer."""

        def bind() -> None:
            self._known.clear()
            self._router = self._context.socket(zmq.ROUTER)
            self._router.setsockopt(zmq.SNDHWM, 0)  # it drops what is above
            # Before it binds: a connection that is lost while the socket closes waits for as long
            # as was said when it was made, for ever if nothing was.
            self._router.setsockopt(zmq.LINGER, 0)
            deadline = time.monotonic() + BOUND_S
            while True:
                try:
                    self._router.bind(f"tcp://127.0.0.1:{self.port or '*'}")
                    break
                except zmq.ZMQError:
                    assert time.monotonic() < deadline
                    time.sleep(0.01)  # the port of the one before is not free yet
            self.port = int(self._router.getsockopt(zmq.LAST_ENDPOINT).rsplit(b":", 1)[1])

        self._do(bind)

    def wait_for(self, message_type: type[M], num: int = 1) -> list[M]:
        """Messages of a type, once there are `num`."""
        return self.wait_until(
            lambda: [m for m in self.received if isinstance(m, message_type)], num
        )

    def wait_until(self, found: Callable[[], list[M]], num: int = 1) -> list[M]:
        with self._news:
            assert self._news.wait_for(lambda: len(found()) >= num, BOUND_S), self.received[-20:]
            return found()

    # ---- its thread

    def _do(self, action: Callable[[], None]) -> None:
        is_done = threading.Event()
        self._actions.put(lambda: (action(), is_done.set()))
        assert is_done.wait(BOUND_S)

    def _run(self) -> None:
        try:
            while not self._is_done:
                while not self._actions.empty():
                    self._actions.get()()
                if self._router is None or self._router.closed:
                    time.sleep(0.002)
                elif self._router.poll(2):
                    self._take()
        finally:  # also if a script raises
            if self._router is not None:
                self._router.close()

    def _take(self) -> None:
        identity, frame = self._router.recv_multipart()
        self.num_frames += 1
        for single in frames_in(frame):
            self._take_message(identity, decode(single))

    def _take_message(self, identity: bytes, message: Message) -> None:
        if isinstance(message, (Connect, Register)):
            self._known.add(identity)
        elif identity not in self._known:
            self._send(identity, [nack_of(None, ProtocolError("an unknown peer"))])
            return
        self._latest = identity
        with self._news:
            self.received.append(message)
            self._news.notify_all()
        self._send(identity, self.script(message) or [])

    def _send(self, identity: bytes, messages: Sequence[Message | bytes]) -> None:
        for message in messages:
            frame = message if isinstance(message, bytes) else encode(message)
            self._router.send_multipart([identity, frame])
