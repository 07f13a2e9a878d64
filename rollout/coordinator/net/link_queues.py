"""The state that a link's thread shares with its owner: inbox, outbox and lease, and the pipe to
wake it.
"""

from __future__ import annotations

import contextlib
import math
import socket
import threading
from collections import deque
from collections.abc import Callable, Sequence

from rollout.coordinator.protocol.codec import batched
from rollout.coordinator.protocol.messages import ConnectAck, RegisterAck
from rollout.errors import RolloutError
from rollout.wire import Message


class SelfPipe:
    """A pair of sockets that ends a poller's wait from another thread or a signal handler.

    Register it with the poller: it is readable after a `wake` until the next `drain`.
    """

    def __init__(self) -> None:
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)

    def fileno(self) -> int:
        return self._reader.fileno()

    def wake(self) -> None:
        # A full buffer wakes the poller already; a closed socket has no poller.
        with contextlib.suppress(OSError):
            self._writer.send(b"\0")

    def drain(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._reader.recv(4096)

    def close(self) -> None:
        self._reader.close()
        self._writer.close()


class Lease:
    """Until when the coordinator surely counts on this peer. A lease starts when the answered
    heartbeat was *sent*, so it ends here no later than at the coordinator. Times are seconds of one
    monotonic clock. One thread writes; any thread may read `until`.
    """

    def __init__(self) -> None:
        self.until = -math.inf
        self._lease_s = 0.0
        self._sequence = 0
        self._unanswered: dict[int, tuple[float, int]] = {}  # heartbeat -> when, how many frames

    def begin(self, lease_s: float, sent_at: float) -> None:
        """A handshake that was sent at `sent_at` is answered."""
        self._lease_s, self.until = lease_s, sent_at + lease_s
        self._unanswered.clear()

    def end(self) -> None:
        """End the lease; only another handshake begins one."""
        self.until = -math.inf
        self._unanswered.clear()

    def heartbeat(self, now: float, num_sent: int = 0) -> int:
        """Return the sequence number of a heartbeat sent at `now`, after `num_sent` frames."""
        self._sequence += 1
        self._unanswered[self._sequence] = (now, num_sent)
        return self._sequence

    def answered(self, sequence: int, now: float) -> int:
        """Renew the lease by the answer to a heartbeat. Returns how many frames have arrived.

        An answer that comes after the lease has ended does not renew it: the coordinator may have
        given this peer up meanwhile.
        """
        if sequence not in self._unanswered:
            return 0
        sent_at, num_sent = self._unanswered[sequence]
        self._unanswered = {s: sent for s, sent in self._unanswered.items() if s > sequence}
        if now < self.until:
            self.until = max(self.until, sent_at + self._lease_s)
        return num_sent


class Inbox:
    """Messages for the owner. `on_news` is called when the first message comes into the empty
    inbox, and at the end; `on_room` when a full inbox has been emptied. `max_messages`: None for no
    limit.
    """

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
        """Whether `take_all` has messages to return, or the end to raise."""
        return bool(self._messages) or self.end is not None

    def put(self, messages: Sequence[Message]) -> None:
        with self._changed:
            was_empty = not self._messages
            self._messages.extend(messages)
            self._changed.notify()
        if was_empty:
            self._on_news()

    def take_all(self, timeout_s: float) -> list[Message]:
        """Return the messages of one session, after waiting up to `timeout_s` seconds for the
        first. A session's first message is the first of the list. Raises `end` once all have been
        taken.
        """
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
        with self._changed:
            self.end = self.end or end
            self._changed.notify_all()
        self._on_news()


class Outbox:
    """Frames for the socket, kept until they have surely arrived. The owner's thread calls `put`
    and `flush`, any thread calls `close`, and the link's thread the rest; `wake` wakes it.
    """

    def __init__(
        self, max_frames: int | None, max_frame_bytes: int, wake: Callable[[], object]
    ) -> None:
        self._max_frames, self._max_frame_bytes, self._wake = max_frames, max_frame_bytes, wake
        self._is_flush_due = False
        self._waiting: deque[bytes] = deque()
        self._sent: deque[bytes] = deque()
        self._num_confirmed = 0  # of all that were ever sent
        self._lock = threading.Lock()
        self._end: RolloutError | None = None
        self._is_lost = False

    @property
    def num_kept(self) -> int:
        return len(self._waiting) + len(self._sent)

    @property
    def num_sent(self) -> int:
        """Frames sent so far, confirmed or not, over all connections."""
        return self._num_confirmed + len(self._sent)

    def put(self, frame: bytes) -> None:
        """Queue a frame. Raises RolloutError if the queue is full or closed. Once the coordinator
        is lost the frame is dropped."""
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
        """Wake the link's thread if frames were put since the last call."""
        if self._is_flush_due:
            self._is_flush_due = False
            self._wake()

    def send_all(self, send: Callable[[bytes], bool]) -> None:
        """Pass waiting frames to `send` in order, small ones as a Batch, until it returns False."""
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
        """Forget the first `num_sent` of all frames ever sent: they have arrived."""
        with self._lock:
            while self._num_confirmed < num_sent:
                self._sent.popleft()
                self._num_confirmed += 1

    def rewind(self) -> None:
        """The connection is lost: queue its unconfirmed frames again, before all others."""
        with self._lock:
            self._waiting.extendleft(reversed(self._sent))
            self._sent.clear()

    def drop_all(self) -> None:
        """The coordinator is lost: drop the waiting frames and all later ones."""
        with self._lock:
            self._is_lost = True
            self._waiting.clear()

    def close(self, end: RolloutError) -> None:
        with self._lock:
            self._end = self._end or end
