"""What a link's thread shares with its owner: messages, frames that may be lost, and the lease."""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable, Sequence

from rollout.coordinator.protocol.codec import batched
from rollout.coordinator.protocol.messages import (
    ConnectAck,
    Message,
    RegisterAck,
)
from rollout.errors import RolloutError


class Lease:
    """For how long the coordinator surely counts on this peer, from when what it answered was
    *sent*: so it ends no later than the coordinator thinks. Times in seconds of one clock. One
    thread writes, any may read `until`.
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
        """It counts no more; only a handshake begins another."""
        self.until = -math.inf
        self._unanswered.clear()

    def heartbeat(self, now: float, num_sent: int = 0) -> int:
        """Return the sequence number of a heartbeat that is sent now, behind `num_sent` frames."""
        self._sequence += 1
        self._unanswered[self._sequence] = (now, num_sent)
        return self._sequence

    def answered(self, sequence: int, now: float) -> int:
        """A heartbeat's answer is here. Returns how many frames have arrived for sure.

        One that comes after the end is too late, whatever it was an answer to: meanwhile this peer
        may have been given up.
        """
        if sequence not in self._unanswered:
            return 0
        sent_at, num_sent = self._unanswered[sequence]
        self._unanswered = {s: sent for s, sent in self._unanswered.items() if s > sequence}
        if now < self.until:
            self.until = max(self.until, sent_at + self._lease_s)
        return num_sent


class Inbox:
    """Messages for the owner. `on_news` is called when there are some where there were none, and at
    the end; `on_room` when a full inbox is emptied. `max_messages` None: as many as come.
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

    def put(self, messages: Sequence[Message]) -> None:
        with self._changed:
            was_empty = not self._messages
            self._messages.extend(messages)
            self._changed.notify()
        if was_empty:
            self._on_news()

    def take_all(self, timeout_s: float) -> list[Message]:
        """Return the messages of one session, waiting for the first one: the answer to a handshake,
        which begins a session, is the first of those returned. Raises the end, once all are taken.
        """
        with self._changed:
            if timeout_s > 0.0:
                self._changed.wait_for(lambda: self._messages or self.end is not None, timeout_s)
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
    """Frames for the socket, kept until the coordinator has them for sure. `put` and `flush` are of
    the owner's thread, `close` of any, the rest is of the link's, which `wake` calls.
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
        """Of all, confirmed or not, over this connection or one before."""
        return self._num_confirmed + len(self._sent)

    def put(self, frame: bytes) -> None:
        """Raises RolloutError if it is full, or the end. Drops it if nobody is left to get it."""
        with self._lock:
            if self._end is not None:
                raise self._end
            if self._is_lost:
                return
            if self._max_frames is not None and self.num_kept >= self._max_frames:
                raise RolloutError(
                    f"{self._max_frames} messages wait for the coordinator; an engine whose lease "
                    "has run out must not go on"
                )
            self._waiting.append(frame)
        self._is_flush_due = True

    def flush(self) -> None:
        """Let what was put here since the last call be sent, if anything was."""
        if self._is_flush_due:
            self._is_flush_due = False
            self._wake()

    def send_all(self, send: Callable[[bytes], bool]) -> None:
        """Give what waits to `send`, in order, small frames together, until one is not taken."""
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
        """So many, of all that were ever sent, have arrived."""
        with self._lock:
            while self._num_confirmed < num_sent:
                self._sent.popleft()
                self._num_confirmed += 1

    def rewind(self) -> None:
        """The connection is gone: what may be lost with it waits again, before all else."""
        with self._lock:
            self._waiting.extendleft(reversed(self._sent))
            self._sent.clear()

    def lose(self) -> None:
        """The coordinator is lost: nobody is left to get what waits, nor what comes."""
        with self._lock:
            self._is_lost = True
            self._waiting.clear()

    def close(self, end: RolloutError) -> None:
        with self._lock:
            self._end = self._end or end
