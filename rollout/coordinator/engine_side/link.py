"""EngineLink: an engine's line to the coordinator, which a thread of its own keeps open."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

import zmq

from rollout.coordinator.dealer import LINGER_MS, CoordinatorLostError, CurveKeys, address_of
from rollout.coordinator.engine_side.queues import Inbox, Outbox
from rollout.coordinator.engine_side.session import EngineSession
from rollout.coordinator.protocol.messages import (
    DEFAULT_MAX_FRAME_BYTES,
    Attempt,
    Disconnect,
    EngineStatus,
    Message,
    Register,
    RegisterAck,
    encode,
)
from rollout.coordinator.waker import Waker
from rollout.errors import RolloutError

_logger = logging.getLogger(__name__)
MAX_QUEUED = 2**16  # messages, in each direction
_MAX_REASON = 1000


class LinkClosedError(RolloutError):
    """A link was used after its end."""


class EngineLink:
    """`receive`, `send` and `may_step` are of one thread, the engine's; `close` of any.

    registration: what to tell the coordinator, at first, when the lease has run out and when it
    asks. status: what to tell in each heartbeat. Both are called by the link's own thread while
    the engine's may be in the middle of a step: they must neither wait for it nor change anything.

    While the coordinator is away messages wait, and are sent after the next registration, those
    first that may have been lost with the connection: some arrive twice, none is missing. Another
    life of the coordinator gets none of them: they are about names that it never gave. The
    engine's thread owes the link `receive` now and then: with a full inbox nothing more is read,
    answers to heartbeats neither.
    """

    def __init__(
        self,
        address: int | str,
        *,
        registration: Callable[[], Register],
        status: Callable[[], EngineStatus],
        curve: CurveKeys | None = None,
        max_queued: int = MAX_QUEUED,
        max_frame_bytes: int = DEFAULT_MAX_FRAME_BYTES,
    ) -> None:
        """Dial, and register as soon as somebody is there. Raises ConfigError for no address."""
        self.address = address_of(address)
        self._max_frame_bytes = max_frame_bytes
        self._context = zmq.Context()
        self._waker = Waker()
        self._max_queued = max_queued
        self._inbox = Inbox(max_queued, self._waker.wake)
        self._outbox = Outbox(max_queued, self._waker.wake)
        self._num_taken = 0  # RegisterAcks that the engine's thread has got
        self._is_closing, self._goodbye = False, Disconnect()
        self._poller = zmq.Poller()  # of the waker, and of this socket for these events
        self._polled: tuple[zmq.Socket[bytes] | None, int] = (None, 0)
        try:
            self._session = EngineSession(
                self._context,
                self.address,
                curve=curve,
                inbox=self._inbox,
                outbox=self._outbox,
                registration=registration,
                status=status,
                max_frame_bytes=max_frame_bytes,
            )
        except BaseException:
            self._waker.close()
            self._context.term()
            raise
        self._thread = threading.Thread(target=self._run, name="engine-link", daemon=True)
        self._thread.start()

    def __enter__(self) -> EngineLink:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if isinstance(error, Exception):
            self.close(f"it failed: {error!r}", is_fault=True)
        else:
            self.close()

    # ---- the engine's thread

    def wait_registered(self, timeout_s: float) -> None:
        """Wait for the first registration. Raises the coordinator's refusal, or
        CoordinatorLostError if nobody answers. Dialling goes on in either case.
        """
        self._session.has_news.wait(timeout_s)
        if self._session.refusal is not None:
            raise self._session.refusal
        if not self._session.num_sessions:
            raise CoordinatorLostError(
                f"no coordinator answers at {self.address} after {timeout_s:g} s; is it running, "
                "and is this its address?"
            )

    def receive(self, timeout_s: float = 0.0) -> list[Message]:
        """Return the messages that are here, waiting up to `timeout_s` for the first; [] if none.
        A RegisterAck is the first of those it comes with.

        RegisterAck, AssignRequest, AbortRequest, ReplyAck, Command, Prepare, Commit, Rollback: all
        others are the link's own. Raises RolloutError when the link is closed or has failed.
        """
        messages = self._inbox.take_all(timeout_s)
        self._num_taken += sum(isinstance(message, RegisterAck) for message in messages)
        return messages

    def send(self, message: Message) -> None:
        """Queue a message; one for a former life of the coordinator is dropped. Raises
        ProtocolError if it cannot be sent, RolloutError if the queue is full or the link closed.
        """
        self._outbox.put(encode(message, self._max_frame_bytes), self._num_taken)

    def may_step(self) -> bool:
        """Whether the engine's lease runs, as of now: also right after the process stood still.

        After a registration it does once `receive` has returned the RegisterAck, which says what
        counts no more. Not while half of the queue waits for the coordinator: steps bring more.
        """
        is_current = self._num_taken == self._session.num_sessions
        has_room = self._outbox.num_kept <= self._max_queued // 2
        return is_current and has_room and time.monotonic() < self._session.lease.until

    @property
    def is_registered(self) -> bool:
        """Whether messages are sent at once."""
        return self._session.is_registered

    @property
    def num_malformed(self) -> int:
        """Messages that were dropped because they could not be understood."""
        return self._session.num_malformed

    # ---- the link's own thread

    def _run(self) -> None:
        try:
            while not self._is_closing:
                self._turn()
            self._session.finish(self._goodbye)
        except Exception as fault:
            _logger.exception("the engine's link failed")
            self._session.lease.end()
            self._end(RolloutError(f"the link to {self.address} failed: {fault!r}"))
            raise
        finally:
            # Here, not in `close`, which several threads may call at once: a context ends once.
            self._session.socket.close(linger=LINGER_MS)
            self._waker.close()
            self._context.term()

    def _turn(self) -> None:
        """Wait until there is something to do, and do it."""
        session = self._session
        socket, events = session.socket, session.events
        # By identity: a new socket may lie where the closed one did, and pass for it.
        if socket is not self._polled[0] or events != self._polled[1]:
            self._poller, self._polled = zmq.Poller(), (socket, events)
            self._poller.register(self._waker, zmq.POLLIN)
            self._poller.register(socket, events)
        left_s = session.due_at - time.monotonic()
        timeout_ms = None if math.isinf(left_s) else max(0, math.ceil(left_s * 1000))
        ready: dict[Any, int] = dict(self._poller.poll(timeout_ms))
        if self._waker.fileno() in ready:  # how a poller names what is no ZeroMQ socket
            self._waker.drain()
        session.turn(ready.get(session.socket, 0))

    def _end(self, reason: RolloutError) -> None:
        self._inbox.close(reason)
        self._outbox.close(reason)

    # ---- the end

    def close(
        self,
        reason: str = "the engine stops",
        *,
        is_fault: bool = False,
        suspects: Sequence[Attempt] = (),
    ) -> None:
        """Send what is queued, if somebody takes it, say goodbye, and end the thread. Twice is
        fine. `is_fault`: what the engine ran may be why it goes, and `suspects` are what it ran.
        """
        self._end(LinkClosedError(f"the link to {self.address} is closed"))
        if not self._is_closing:
            self._goodbye = Disconnect(
                reason=reason[:_MAX_REASON], is_fault=is_fault, suspects=tuple(suspects)
            )
        self._is_closing = True
        self._waker.wake()
        self._thread.join()
