"""Waker: ends a poller's wait from another thread or a signal handler."""

from __future__ import annotations

import contextlib
import socket


class Waker:
    """Register it with a poller: it is readable after a `wake` until the next `drain`."""

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
