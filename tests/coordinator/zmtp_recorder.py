"""Recorder: keeps what a peer sends (ZMTP 3, rfc.zeromq.org/spec/23), and repeats a frame of it."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Sequence

WAIT_S = 30.0
_GREETING_BYTES, _IS_LONG = 64, 2


class Recorder:
    """A proxy in front of a router that keeps what one peer sends, and can send it again.

    `address`: where the peer dials it, on its own host.
    """

    def __init__(self, address: str) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self.sent = bytearray()
        self.has_lost_the_router = threading.Event()
        host, _, port = address.removeprefix("tcp://").rpartition(":")
        self._router = socket.create_connection((host, int(port)))
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        self._peer, _ = self._listener.accept()
        back = threading.Thread(target=self._pass_back, daemon=True)
        back.start()
        while received := self._peer.recv(2**16):
            self.sent += received
            self._router.sendall(received)
        back.join()

    def _pass_back(self) -> None:
        with contextlib.suppress(ConnectionResetError):  # it closes with bytes unread
            while received := self._router.recv(2**16):
                self._peer.sendall(received)
        self.has_lost_the_router.set()
        self._peer.shutdown(socket.SHUT_RDWR)

    def repeat_last_frame(self) -> None:
        self._router.sendall(frames_of(self.sent)[-1])

    def close(self) -> None:
        with contextlib.suppress(OSError):  # it is closed already
            self._router.shutdown(socket.SHUT_RDWR)
        self._thread.join(WAIT_S)
        for each in (self._router, self._peer, self._listener):
            each.close()


def frames_of(stream: bytes | bytearray) -> Sequence[bytes]:
    """The whole frames that follow the handshake, with their headers."""
    frames, start = [], _GREETING_BYTES
    while start + 2 <= len(stream):
        header = 9 if stream[start] & _IS_LONG else 2
        end = start + header + int.from_bytes(stream[start + 1 : start + header], "big")
        frames.append(bytes(stream[start:end]))
        start = end
    return frames
