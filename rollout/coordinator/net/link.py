"""Link: keeps the session of a client or an engine with the coordinator, in a thread.

Used by `rollout.coordinator.client.inference_client` for clients, and by
`rollout.apis.engine_process` and `rollout.coordinator.agent.agent` for engines. A link owns a
ZeroMQ context, a socket and a thread. The thread that uses the link is called the owner's thread.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

import zmq

from rollout.coordinator.net.security import KEY_IS_UNKNOWN, CurveKeys, handshake_fault
from rollout.coordinator.net.sockets import CONNECTED, REFUSED, DealerSocket, SelfPipe, address_of
from rollout.coordinator.protocol.codec import (
    ProtocolVersionError,
    batched,
    decode,
    encode,
    failures_of,
    require_valid,
)
from rollout.coordinator.protocol.messages import (
    FOR_CLIENTS,
    FOR_ENGINES,
    PROTOCOL_VERSION,
    Attempt,
    Connect,
    ConnectAck,
    Disconnect,
    EngineStatus,
    Heartbeat,
    Nack,
    Register,
    RegisterAck,
)
from rollout.errors import ConfigError, CoordinatorLostError, ProtocolError, RolloutError
from rollout.wire import DEFAULT_MAX_FRAME_BYTES, Message

_logger = logging.getLogger(__name__)

MAX_QUEUED = 2**16  # messages of an engine, in each direction
_MIN_HEARTBEAT_S = 0.005
_REDIAL_S, _RETRY_S = 0.1, 0.5  # pauses after a lost connection, and after a refusal
# Seconds that a connection and its handshake may take before both are tried again.
_ANSWER_S = 2.0
# After refused connections for this many seconds, a client takes the coordinator's process for
# ended.
_REFUSED_S = 0.25
GIVE_UP_S = 30.0
# How long a closing socket may take to send its last frames.
_LINGER_MS = 500


class Lease:
    """The time until which the coordinator certainly keeps this peer's session.

    An answered heartbeat renews the lease from the time when the heartbeat was sent. So the lease
    ends here no later than at the coordinator. Times are seconds of one monotonic clock. Only the
    link's thread writes. Any thread may read `until`."""

    def __init__(self) -> None:
        self.until = -math.inf
        self._lease_s = 0.0
        self._sequence = 0
        self._unanswered: dict[int, tuple[float, int]] = {}  # by sequence: time, frames sent

    def begin(self, lease_s: float, sent_at: float) -> None:
        """Begin a lease of `lease_s` seconds with a handshake that was sent at `sent_at`."""
        self._lease_s, self.until = lease_s, sent_at + lease_s
        self._unanswered.clear()

    def end(self) -> None:
        """End the lease. Only another handshake begins a new one."""
        self.until = -math.inf
        self._unanswered.clear()

    def heartbeat(self, now: float, num_sent: int = 0) -> int:
        """Return the sequence number of a heartbeat sent at `now`, after `num_sent` frames."""
        self._sequence += 1
        self._unanswered[self._sequence] = (now, num_sent)
        return self._sequence

    def answered(self, sequence: int, now: float) -> int:
        """Renew the lease by the answer to the heartbeat `sequence`, unless the lease has ended.
        Returns how many frames were sent before that heartbeat, or 0 if the heartbeat is unknown or
        has been answered."""
        if sequence not in self._unanswered:
            return 0
        sent_at, num_sent = self._unanswered[sequence]
        self._unanswered = {s: sent for s, sent in self._unanswered.items() if s > sequence}
        # After its end the coordinator may have ended the session.
        if now < self.until:
            self.until = max(self.until, sent_at + self._lease_s)
        return num_sent


class Inbox:
    """Received messages for the owner. The link's thread calls `put`, the owner's `take_all`.

    on_news: called when an empty inbox gets a message, and by `close`.
    on_room: called after messages were taken from a full inbox.
    max_messages: size that counts as full; None for no limit."""

    def __init__(
        self, max_messages: int | None, on_news: Callable[[], None], on_room: Callable[[], None]
    ) -> None:
        self._max_messages, self._on_news, self._on_room = max_messages, on_news, on_room
        self._messages: deque[Message] = deque()
        self._changed = threading.Condition()
        self.end: RolloutError | None = None

    @property
    def has_room(self) -> bool:
        return self._max_messages is None or len(self._messages) < self._max_messages

    @property
    def has_news(self) -> bool:
        """Whether `take_all` returns messages or raises `end` without waiting."""
        return bool(self._messages) or self.end is not None

    def put(self, messages: Sequence[Message]) -> None:
        """Add received messages, at least one, even if the inbox is full."""
        with self._changed:
            was_empty = not self._messages
            self._messages.extend(messages)
            self._changed.notify()
        if was_empty:
            self._on_news()

    def take_all(self, timeout_s: float) -> list[Message]:
        """Return the received messages, after waiting up to `timeout_s` seconds for the first one.
        Returns [] if no message came. All messages of a list belong to one session. A session's
        first message comes first in its list. Raises `end` once the inbox is closed and empty."""
        with self._changed:
            if timeout_s > 0.0:
                self._changed.wait_for(lambda: self.has_news, timeout_s)
            was_full = not self.has_room
            taken: list[Message] = []
            while self._messages:
                if taken and isinstance(self._messages[0], (ConnectAck, RegisterAck)):
                    break
                taken.append(self._messages.popleft())
            if not taken and self.end is not None:
                raise self.end
        if was_full:
            self._on_room()
        return taken

    def close(self, end: RolloutError) -> None:
        """Make `take_all` raise `end` after the last message. Only the first call counts."""
        with self._changed:
            self.end = self.end or end
            self._changed.notify_all()
        self._on_news()


class Outbox:
    """Frames for the coordinator, kept until their arrival is confirmed. The owner's thread calls
    `put`, `flush` and `num_kept`. Any thread calls `close`. The link's thread calls everything
    else, and `wake` wakes it. `max_frames` is None for no limit."""

    def __init__(
        self, max_frames: int | None, max_frame_bytes: int, wake: Callable[[], object]
    ) -> None:
        self._max_frames, self._max_frame_bytes, self._wake = max_frames, max_frame_bytes, wake
        self._is_flush_due = False
        self._waiting: deque[bytes] = deque()
        self._sent: deque[bytes] = deque()
        self._num_confirmed = 0  # frames, of all that were ever sent
        self._lock = threading.Lock()
        self._end: RolloutError | None = None
        self._is_lost = False

    @property
    def num_kept(self) -> int:
        return len(self._waiting) + len(self._sent)

    @property
    def num_sent(self) -> int:
        """Number of frames sent so far over all connections, confirmed or not."""
        return self._num_confirmed + len(self._sent)

    def put(self, frame: bytes) -> None:
        """Queue a frame, or drop it once the coordinator is lost. Raises RolloutError if the queue
        is full or closed."""
        with self._lock:
            if self._end is not None:
                raise self._end
            if self._is_lost:
                return
            if self._max_frames is not None and self.num_kept >= self._max_frames:
                raise RolloutError(
                    f"{self._max_frames} messages wait for the coordinator; an engine whose lease "
                    "has run out must not step"
                )
            self._waiting.append(frame)
        self._is_flush_due = True

    def flush(self) -> None:
        """Wake the link's thread if frames were queued since the last call."""
        if self._is_flush_due:
            self._is_flush_due = False
            self._wake()

    def send_all(self, send: Callable[[bytes], bool]) -> None:
        """Pass waiting frames to `send` in order until it returns False. Small frames go as one
        Batch."""
        while self._waiting:
            with self._lock:
                waiting = list(self._waiting)
            for frame, num_frames in batched(waiting, self._max_frame_bytes):
                if not send(frame):
                    return
                with self._lock:
                    for _ in range(num_frames):
                        self._sent.append(self._waiting.popleft())

    def confirm(self, num_sent: int) -> None:
        """Drop the first `num_sent` of all frames ever sent, because these frames have arrived."""
        with self._lock:
            while self._num_confirmed < num_sent:
                self._sent.popleft()
                self._num_confirmed += 1

    def rewind(self) -> None:
        """Queue the unconfirmed frames of a lost connection again, before all others."""
        with self._lock:
            self._waiting.extendleft(reversed(self._sent))
            self._sent.clear()

    def drop_all(self) -> None:
        """Drop the waiting frames and all later ones, because the coordinator is lost."""
        with self._lock:
            self._is_lost = True
            self._waiting.clear()

    def close(self, end: RolloutError) -> None:
        """Make `put` raise `end` from now on."""
        with self._lock:
            self._end = self._end or end


class LinkClosedError(RolloutError):
    """A link was used after `Link.close`."""


class Link:
    """A peer's session with the coordinator, kept by a thread of its own.

    The link's thread connects, sends the handshake and heartbeats, and reconnects after a lost
    connection. It moves messages between the socket and the owner. A busy owner does not end the
    session. One thread calls `receive`, `queue`, `flush` and `may_step`. Any thread may call
    `close`.

    handshake: returns the first message of each session: a client's Connect or an engine's
        Register.
    status: returns the EngineStatus for each heartbeat; None makes this a client's link.
    on_news: called when `receive` has something to return after it had nothing. It must not block.

    The link's thread calls these three functions. `handshake` and `status` must neither wait for
    the owner's thread, which may be in a step, nor disturb it.

    Messages wait while there is no session. After the next handshake the link repeats messages that
    may have been lost with the connection. So a message may arrive twice, but none is lost. An
    engine must call `receive` now and then, because the link reads nothing while its inbox is full.

    The link ends with CoordinatorLostError if the coordinator disconnects, if another coordinator
    is at its address, or if it was unreachable for `give_up_s` seconds. A client's link ends
    earlier: if the coordinator's process has ended, if it no longer knows the client, or if it was
    unreachable for the client's lease."""

    def __init__(
        self,
        address: int | str,
        *,
        handshake: Callable[[], Connect | Register],
        status: Callable[[], EngineStatus] | None = None,
        on_news: Callable[[], None] = lambda: None,
        curve: CurveKeys | None = None,
        max_queued: int | None = MAX_QUEUED,
        max_frame_bytes: int = DEFAULT_MAX_FRAME_BYTES,
        give_up_s: float = GIVE_UP_S,
    ) -> None:
        """Start the thread, which connects. Raises ConfigError if `address` is not an address.
        `max_queued` is the number of messages that may wait in each direction; None for no
        limit."""
        self.address = address_of(address)
        self._handshake, self._status = handshake, status
        self._is_client = status is None
        self._for_owner = FOR_CLIENTS if self._is_client else FOR_ENGINES
        self._curve, self._max_frame_bytes = curve, max_frame_bytes
        self._max_queued, self._give_up_s = max_queued, give_up_s
        self._waker = SelfPipe()
        self._inbox = Inbox(max_queued, on_news, on_room=self._waker.wake)
        self.outbox = Outbox(max_queued, max_frame_bytes, self._waker.wake)
        self._lease = Lease()
        self._last_message: Disconnect | None = None
        self._arrived: list[Message] = []  # received messages that are not in the inbox yet
        self._has_ended = False
        # ---- the session; `_num_sessions` counts sessions whose first message is in the inbox
        self.num_malformed = 0
        self.refusal: RolloutError | None = None
        self._possible_fault = ""  # why a handshake may have failed
        self._has_answer = threading.Event()  # a first answer to a handshake, or the end
        self._num_sessions = self._num_taken = 0
        self._is_in_session = False
        self._coordinator_id: bytes | None = None
        self._lease_s = self._heartbeat_s = math.inf
        self._next_heartbeat = self._redial_at = self._lost_at = self._give_up_at = math.inf
        self._received_at = -math.inf
        # ---- of the connection
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._handshake_sent_at: float | None = None  # over this connection
        try:
            self._dealer = self._dial()
        except (ConfigError, zmq.ZMQError):
            self._waker.close()
            self.context.term()
            raise
        name = "client-link" if self._is_client else "engine-link"
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def __enter__(self) -> Link:
        return self

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        if isinstance(error, Exception):
            self.close(f"it failed: {error!r}", is_fault=True)
        else:
            self.close()

    # ---- the owner's thread

    @property
    def socket(self) -> zmq.Socket[bytes]:
        """The socket of the latest connection. Only the link's thread may use it."""
        return self._dealer.socket

    def wait_registered(self, timeout_s: float) -> None:
        """Wait up to `timeout_s` seconds for the first session. Raises the coordinator's refusal,
        or CoordinatorLostError without an answer. The link keeps trying in either case. Raises the
        link's error if the link has ended."""
        self._has_answer.wait(timeout_s)
        if self.refusal is not None:
            raise self.refusal
        if not self._num_sessions:
            raise self._inbox.end or CoordinatorLostError(
                f"no coordinator answers at {self.address} after {timeout_s:g} s; start one with "
                "`rollout coordinator`, or if it runs, is this its address?"
                f"{self._possible_fault}"
            )

    def receive(self, timeout_s: float = 0.0) -> list[Message]:
        """Return the received messages, after waiting up to `timeout_s` seconds for the first one.

        A ConnectAck or RegisterAck always comes first in a list. Clients also get EngineReply,
        EngineReplyPartial, Ack and Nack. Engines also get AssignRequest, AbortRequest, ReplyAck,
        commands, Prepare, Commit and Rollback. The link handles all other messages. A malformed
        message is replaced by an EngineReply for each request that it names, or by a Nack for the
        command that it names.

        Once the link has ended and all messages have been returned, raises CoordinatorLostError,
        LinkClosedError, or another RolloutError if the link failed."""
        messages = self._inbox.take_all(timeout_s)
        self._num_taken += bool(messages) and isinstance(messages[0], RegisterAck)
        return messages

    @property
    def has_news(self) -> bool:
        """Whether `receive` returns or raises something now. `on_news` is called when this becomes
        True."""
        return self._inbox.has_news

    def queue(self, message: Message) -> None:
        """Queue a message, which the next `flush` sends at the latest. Drops the message once the
        coordinator is lost. Raises ProtocolError if the message cannot be sent, RolloutError if the
        queue is full, and LinkClosedError after `close`."""
        self.outbox.put(encode(message, self._max_frame_bytes))

    def flush(self) -> None:
        """Send the queued messages. Call it once per pass of the owner's loop."""
        # Once per pass: waking the link's thread takes the interpreter lock from the owner's.
        self.outbox.flush()

    def may_step(self) -> bool:
        """Return whether the engine may step now. Its lease must be valid. `receive` must have
        returned the latest RegisterAck, which names the attempts to keep. The queue must be at most
        half full, since each step adds messages."""
        is_current = self._num_taken == self._num_sessions
        has_room = self._max_queued is None or self.outbox.num_kept <= self._max_queued // 2
        return is_current and has_room and time.monotonic() < self._lease.until

    def close(
        self,
        reason: str = "the engine stops",
        *,
        is_fault: bool = False,
        suspects: Sequence[Attempt] = (),
    ) -> None:
        """Send the queued messages if there is a session, disconnect, and end the thread.
        `is_fault` tells that the engine failed, perhaps because of `suspects`, the attempts of its
        last step. A second call does nothing."""
        closed = LinkClosedError(f"the link to {self.address} is closed")
        self.outbox.close(closed)
        self._inbox.close(closed)
        if self._last_message is None:
            self._last_message = Disconnect.because(reason, is_fault=is_fault, suspects=suspects)
        self._has_answer.set()
        self._waker.wake()
        self._thread.join()

    # ---- the link's own thread

    def _run(self) -> None:
        try:
            while self._last_message is None and not self._has_ended:
                self._run_once()
            if self._is_in_session and self._last_message is not None:
                self.outbox.send_all(self._dealer.send)
                self._dealer.send(encode(self._last_message))
        except Exception as fault:
            _logger.exception("the link to the coordinator failed")
            self._end(RolloutError(f"the link to {self.address} failed: {fault!r}"))
            raise
        finally:
            # Here, not in `close`, which several threads may call at once: a context ends once.
            self._is_in_session = False
            self._lease.end()
            self._dealer.close(_LINGER_MS)
            self._waker.close()
            self.context.term()

    def _run_once(self) -> None:
        """Wait for a message, a connection event, the owner or a timer, and handle what has
        come."""
        due_at = min(self._redial_at, self._give_up_at)
        if self._is_in_session:
            due_at = min(self._next_heartbeat, self._silent_at)
        left_s = due_at - time.monotonic()
        timeout_ms = None if math.isinf(left_s) else max(0, math.ceil(left_s * 1000))
        has_message, has_event = self._dealer.wait(timeout_ms, for_messages=self._inbox.has_room)
        if has_message:
            # One message, which may be a Batch: asking in vain for another costs more than polling.
            self._receive()
        for event in self._dealer.events() if has_event else ():
            if event == CONNECTED:
                self._send_handshake()
            elif fault := handshake_fault(event):
                self._handshake_failed(fault, is_certain=event == KEY_IS_UNKNOWN)
            else:
                self._receive(until_empty=True)  # messages that came before the end
                self._disconnected(is_refused=event == REFUSED)
        self._handle_timers(time.monotonic())
        if self._is_in_session:
            self.outbox.send_all(self._dealer.send)

    @property
    def _silent_at(self) -> float:
        """Monotonic time in seconds at which another session begins if nothing arrives."""
        # For a client any message counts: answers to its heartbeats may be late.
        return self._received_at + self._lease_s if self._is_client else self._lease.until

    def _handle_timers(self, now: float) -> None:
        if self._is_in_session and now >= self._silent_at:
            self._end_session("it was silent for the lease", now)
        if self._is_in_session:
            if now >= self._next_heartbeat:
                self._send_heartbeat(now)
        elif now >= self._give_up_at:
            self._give_up(f"it was unreachable for {now - self._lost_at:.3g} s")
        elif now >= self._redial_at:
            self._dealer.close()
            self._dealer = self._dial()

    def _send_heartbeat(self, now: float) -> None:
        self._next_heartbeat = now + self._heartbeat_s
        sequence = self._lease.heartbeat(now, self.outbox.num_sent)
        status = None if self._status is None else self._status()
        self._dealer.send(encode(Heartbeat(sequence=sequence, status=status)))

    # ---- the connection

    def _dial(self) -> DealerSocket:
        self._handshake_sent_at, self._redial_at = None, time.monotonic() + _ANSWER_S
        return DealerSocket(
            *(self.context, self.address, self._waker),
            max_frame_bytes=self._max_frame_bytes,
            curve=self._curve,
        )

    def _disconnected(self, *, is_refused: bool) -> None:
        now = time.monotonic()
        if self._has_ended:
            return
        if self._is_in_session:
            self._end_session("the connection is lost", now)
            return
        self._dealer.close()
        self._redial_at = now + _REDIAL_S
        if is_refused and self._is_client and now - self._lost_at >= _REFUSED_S:
            self._give_up("its process has ended, connections are refused")

    def _handshake_failed(self, fault: str, *, is_certain: bool) -> None:
        """Record a failed handshake. The link tries again. If `is_certain`, a key is the cause, and
        `wait_registered` raises at once. Otherwise it raises at its deadline, because the
        coordinator may have ended during the handshake."""
        if not is_certain:
            self._possible_fault = f" If it is: {fault}"
        elif self.refusal is None:
            self.refusal = ConfigError(f"the coordinator at {self.address}: {fault}")
            _logger.warning("%s", self.refusal)
            self._has_answer.set()

    def _send_handshake(self) -> None:
        handshake = self._handshake()
        require_valid(handshake)  # the handshake has a user's values
        self._dealer.send(encode(handshake, self._max_frame_bytes))
        self._handshake_sent_at = time.monotonic()
        self._redial_at = self._handshake_sent_at + _ANSWER_S

    def _begin_session(self, ack: ConnectAck | RegisterAck) -> None:
        """Begin the session if `ack` answers this connection's handshake and fits this peer."""
        if self._handshake_sent_at is None or self._is_in_session:
            return  # `ack` answers no handshake of this connection
        if isinstance(ack, ConnectAck) and ack.protocol_version != PROTOCOL_VERSION:
            spoken = f"{ack.protocol_version}, this process {PROTOCOL_VERSION}"
            self._refused(ProtocolVersionError(f"the coordinator speaks protocol {spoken}"))
            return
        if self._coordinator_id not in (None, ack.coordinator_id):
            self._give_up("another coordinator is at its address, which does not know this peer")
            return
        if isinstance(ack, ConnectAck) and self._num_sessions and not ack.is_resumed:
            self._give_up("it no longer knows this client, whose lease ran out")
            return
        self._is_in_session, self._coordinator_id, self.refusal = True, ack.coordinator_id, None
        self._lost_at = self._redial_at = self._give_up_at = math.inf
        self._lease_s, self._heartbeat_s = ack.lease_s, max(ack.heartbeat_s, _MIN_HEARTBEAT_S)
        self._next_heartbeat = time.monotonic()
        # In this order: the engine's thread may step under the lease once it has taken the message.
        self._num_sessions += 1
        self._lease.begin(ack.lease_s, self._handshake_sent_at)
        self._arrived.append(ack)
        self._deliver()
        self._has_answer.set()
        _logger.debug("%s: session %d", self.address, self._num_sessions)

    def _end_session(self, why: str, now: float) -> None:
        """End the session, queue its unconfirmed frames again, and reconnect."""
        _logger.debug("coordinator at %s: %s", self.address, why)
        self._is_in_session = False
        self._dealer.close()
        self.outbox.rewind()
        give_up_s = min(self._give_up_s, self._lease_s) if self._is_client else self._give_up_s
        self._lost_at, self._give_up_at, self._redial_at = now, now + give_up_s, now

    def _refused(self, error: RolloutError) -> None:
        """Handle a Nack with which the coordinator refuses or no longer knows this peer."""
        now = time.monotonic()
        self._lease.end()
        if self._is_in_session:
            self._end_session(f"it no longer knows this peer ({error})", now)
            return
        self.refusal = error
        self._redial_at = now + _RETRY_S
        self._has_answer.set()
        _logger.warning("refused at %s: %s", self.address, error)

    def _give_up(self, reason: str) -> None:
        because = "" if self.refusal is None else f"; its last refusal: {self.refusal}"
        error = CoordinatorLostError(
            f"the coordinator at {self.address} is lost: {reason}{because}"
        )
        # Not a warning: most coordinators disconnect after a shutdown.
        _logger.debug("coordinator at %s: %s%s", self.address, reason, because)
        self._end(error)

    def _end(self, error: RolloutError) -> None:
        self._has_ended, self._is_in_session = True, False
        self._lease.end()
        self.outbox.drop_all()
        self._deliver()  # messages that came before the end
        self._inbox.close(error)
        self._has_answer.set()

    # ---- messages

    def _receive(self, *, until_empty: bool = False) -> None:
        while self._inbox.has_room:
            try:
                frames = self._dealer.receive()
            except ProtocolError as fault:
                frames = []
                self._malformed(fault)
            if frames is None:
                return
            self._received_at = time.monotonic()
            for frame in frames:  # a malformed frame does not affect the others
                try:
                    self._handle(decode(frame, self._max_frame_bytes))
                except ProtocolError as fault:
                    self._malformed(fault)
                    # The requests or the command that it names fail with the fault.
                    self._arrived += failures_of(frame, fault, self._for_owner)
            self._deliver()
            if not until_empty:
                return

    def _malformed(self, fault: ProtocolError) -> None:
        self.num_malformed += 1
        if self.num_malformed == 1:
            _logger.warning("coordinator %s sent a malformed frame: %s", self.address, fault)

    def _deliver(self) -> None:
        arrived, self._arrived = self._arrived, []
        if arrived:
            self._inbox.put(arrived)

    def _handle(self, message: Message) -> None:
        if self._has_ended:
            return
        if isinstance(message, Heartbeat):
            if not self._is_in_session:  # the RegisterAck comes once a running command has ended
                self._give_up_at = max(self._give_up_at, time.monotonic() + self._give_up_s)
            self.outbox.confirm(self._lease.answered(message.sequence, time.monotonic()))
        elif isinstance(message, ConnectAck if self._is_client else RegisterAck):
            self._begin_session(message)
        elif isinstance(message, Nack) and message.command_id is None:
            self._refused(message.error.to_error())
        elif isinstance(message, Disconnect):
            self._give_up(f"it disconnected: {message.reason or 'no reason given'}")
        elif type(message) in self._for_owner:
            self._arrived.append(message)
        else:
            raise ProtocolError(f"{type(message).__name__} is not a message for this peer")
