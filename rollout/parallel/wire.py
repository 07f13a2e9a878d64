"""Wire: one end of a stream of messages between two processes, with deadlines."""

from __future__ import annotations

import select
import socket
import struct
import time
from typing import Protocol

_HEADER = struct.Struct("<Q")
_RECEIVED_AT_ONCE = 1 << 18


class WireLostError(Exception):
    """The other end is gone."""


class Wire(Protocol):
    """One end. Messages arrive in order, whole or not at all."""

    def send(self, message: bytes, timeout_s: float | None) -> None:
        """Raises TimeoutError if the other end takes nothing for so long, and WireLostError."""
        ...

    def receive(self, timeout_s: float | None) -> bytes:
        """Wait for the next message; None as `timeout_s` waits without end. Raises TimeoutError,
        and WireLostError."""
        ...

    def has_message(self) -> bool:
        """Whether `receive` would return, or raise, at once."""
        ...

    def is_lost(self) -> bool:
        """Whether the other end is gone, and has left no message."""
        ...

    def close(self) -> None:
        """The other end finds it lost. A second call does nothing."""
        ...


class SocketWire:
    """Implements `Wire` over a connected stream socket, which it owns."""

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected
        self._received = bytearray()  # kept if `receive` is interrupted, as by Ctrl-C

    def send(self, message: bytes, timeout_s: float | None) -> None:
        try:
            self._socket.settimeout(timeout_s)
            self._socket.sendall(_HEADER.pack(len(message)) + message)
        except TimeoutError:
            raise
        except OSError as error:
            raise WireLostError(str(error)) from error

    def receive(self, timeout_s: float | None) -> bytes:
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while (end := self._end_of_message()) is None:
            try:
                self._socket.settimeout(deadline and max(1e-3, deadline - time.monotonic()))
                received = self._socket.recv(_RECEIVED_AT_ONCE)
            except TimeoutError:
                if deadline is not None and time.monotonic() >= deadline:
                    raise
                continue
            except OSError as error:
                raise WireLostError(str(error)) from error
            if not received:
                raise WireLostError("it has ended")
            self._received += received
        message = bytes(self._received[_HEADER.size : end])
        del self._received[:end]
        return message

    def _end_of_message(self) -> int | None:
        """Where the first message in what was received ends; None while it is not complete."""
        if len(self._received) < _HEADER.size:
            return None
        end: int = _HEADER.size + _HEADER.unpack_from(self._received)[0]
        return end if end <= len(self._received) else None

    def has_message(self) -> bool:
        is_here = self._end_of_message() is not None
        return is_here or bool(select.select([self._socket], [], [], 0)[0])

    def is_lost(self) -> bool:
        if self._end_of_message() is not None:
            return False
        self._socket.settimeout(0.0)
        try:
            return not self._socket.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return False
        except OSError:
            return True

    def send_socket(self, passed: socket.socket) -> None:
        """Give the other end a socket, which `receive_socket` returns there. Unix sockets only."""
        socket.send_fds(self._socket, [b"\0"], [passed.fileno()])

    def receive_socket(self, timeout_s: float) -> socket.socket:
        """The socket that the other end gives. Raises WireLostError."""
        self._socket.settimeout(timeout_s)
        try:
            _, descriptors, _, _ = socket.recv_fds(self._socket, 1, 1)
        except OSError as error:
            raise WireLostError(str(error)) from error
        if len(descriptors) != 1:
            raise WireLostError("it has ended")
        return socket.socket(fileno=descriptors[0])

    def close(self) -> None:
        self._socket.close()
