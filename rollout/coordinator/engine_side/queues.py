"""The two bounded queues between an engine's thread and the thread of its socket."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from rollout.coordinator.protocol.messages import Message, RegisterAck
from rollout.errors import RolloutError


class Inbox:
    """Messages for the engine's thread. `on_room` is called when a full one is emptied."""

    def __init__(self, max_messages: int, on_room: Callable[[], None]) -> None:
        self._max_messages, self._on_room = max_messages, on_room
        self._messages: deque[Message] = deque()
        self._news = threading.Condition()
        self._end: RolloutError | None = None

    @property
    def has_room(self) -> bool:
        return len(self._messages) < self._max_messages

    def put(self, message: Message) -> None:
        with self._news:
            self._messages.append(message)
            self._news.notify()

    def take_all(self, timeout_s: float) -> list[Message]:
        """Return the messages of one session, waiting for the first one: a RegisterAck, which
        begins a session, is the first of those returned. Raises the end, once all are taken.
        """
        with self._news:
            self._news.wait_for(lambda: self._messages or self._end is not None, timeout_s)
            was_full = not self.has_room
            taken: list[Message] = []
            while self._messages:
                if taken and isinstance(self._messages[0], RegisterAck):
                    break
                taken.append(self._messages.popleft())
            if not taken and self._end is not None:
                raise self._end
        if was_full:
            self._on_room()
        return taken

    def close(self, end: RolloutError) -> None:
        with self._news:
            self._end = self._end or end
            self._news.notify_all()


class Outbox:
    """Frames for the socket, kept until the coordinator has them for sure. `on_first` is called
    when one waits where none did. `put` and `close` are of any thread, the rest is of the socket's.
    """

    def __init__(self, max_frames: int, on_first: Callable[[], None]) -> None:
        self._max_frames, self._on_first = max_frames, on_first
        self._waiting: deque[bytes] = deque()
        self._sent: deque[bytes] = deque()
        self._first_session = 0  # of this life of the coordinator
        self._num_confirmed = 0  # of all that were ever sent
        self._marks: dict[int, int] = {}  # heartbeat -> how many had been sent before it
        self._lock = threading.Lock()
        self._end: RolloutError | None = None

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_kept(self) -> int:
        return len(self._waiting) + len(self._sent)

    def put(self, frame: bytes, session: int) -> None:
        """`session`: the one that the frame belongs to; it is dropped if a life of the coordinator
        has begun since. Raises RolloutError if it is full, or the end.
        """
        with self._lock:
            if self._end is not None:
                raise self._end
            if session < self._first_session:
                return
            if self.num_kept >= self._max_frames:
                raise RolloutError(
                    f"{self._max_frames} messages wait for the coordinator; an engine whose lease "
                    "has run out must not go on"
                )
            self._waiting.append(frame)
            is_first = len(self._waiting) == 1
        if is_first:
            self._on_first()

    def send_all(self, send: Callable[[bytes], bool]) -> None:
        """Give what waits to `send`, in order, until it takes one no more."""
        while self._waiting and send(self._waiting[0]):
            with self._lock:
                self._sent.append(self._waiting.popleft())

    def mark(self, sequence: int) -> None:
        """A heartbeat has been sent, after all that was sent before."""
        self._marks[sequence] = self._num_confirmed + len(self._sent)

    def confirm(self, sequence: int) -> None:
        """A heartbeat is answered: what was sent before it on its connection has arrived."""
        num_arrived = self._marks.get(sequence, 0)
        with self._lock:
            while self._num_confirmed < num_arrived:
                self._sent.popleft()
                self._num_confirmed += 1
        self._marks = {s: num for s, num in self._marks.items() if s > sequence}

    def rewind(self) -> None:
        """The connection is gone: what may be lost with it waits again, before all else."""
        with self._lock:
            self._waiting.extendleft(reversed(self._sent))
            self._sent.clear()
        self._marks.clear()

    def begin_life(self, session: int) -> None:
        """From `session` on there is another coordinator, to which nothing of before is known: what
        waits is dropped. To be called before anything is sent in that session.
        """
        with self._lock:
            self._first_session = session
            self._waiting.clear()

    def close(self, end: RolloutError) -> None:
        with self._lock:
            self._end = self._end or end
