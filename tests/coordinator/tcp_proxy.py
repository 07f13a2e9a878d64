"""TcpProxy: the network between a peer and its coordinator, which a test can cut and mend."""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading


class TcpProxy:
    """While it is cut connections are neither refused nor answered, as where packets are lost."""

    def __init__(self, port: int) -> None:
        self._target = ("127.0.0.1", port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._other: dict[socket.socket, socket.socket] = {}
        self._selector = selectors.DefaultSelector()
        self._lock = threading.Lock()
        self._is_cut = self._is_done = False
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> TcpProxy:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._is_done = True
        self._thread.join()
        self.cut()
        self._listener.close()
        self._selector.close()

    def cut(self) -> None:
        """End all connections; new ones have no answer until `mend`."""
        with self._lock:
            if not self._is_cut:
                self._selector.unregister(self._listener)
            self._is_cut = True
            while self._other:
                self._close(next(iter(self._other)))

    def mend(self) -> None:
        with self._lock:
            self._is_cut = False
            self._selector.register(self._listener, selectors.EVENT_READ)

    def _run(self) -> None:
        while not self._is_done:
            for key, _ in self._selector.select(0.01):
                with self._lock:
                    assert isinstance(key.fileobj, socket.socket)
                    if key.fileobj is self._listener:
                        self._accept()
                    elif key.fileobj in self._other:
                        self._pass_on(key.fileobj)

    def _accept(self) -> None:
        if self._is_cut:
            return
        here, _ = self._listener.accept()
        there = socket.create_connection(self._target)
        self._other |= {here: there, there: here}
        for end in (here, there):
            self._selector.register(end, selectors.EVENT_READ)

    def _pass_on(self, end: socket.socket) -> None:
        with contextlib.suppress(OSError):
            if received := end.recv(2**16):
                self._other[end].sendall(received)
                return
        self._close(end)

    def _close(self, end: socket.socket) -> None:
        for one in (end, self._other[end]):
            del self._other[one]
            self._selector.unregister(one)
            one.close()
