"""Wire: messages between two processes of one machine, with deadlines. Linux only.

Used by `rollout.parallel.channel`, which sends commands over Wires, and by
`rollout.tensor_parallel.start`, which connects them. Child processes get one end of a socket pair.
Ranks in a trainer's processes use RankListener and `wire_to_lead`.
"""

from __future__ import annotations

import os
import select
import socket
import struct
import time
from typing import Protocol

from rollout.errors import ConfigError, LockstepError

_HEADER = struct.Struct("<Q")
_RECEIVED_AT_ONCE = 1 << 18
_CREDENTIALS = struct.Struct("=iII")  # process id, user id and group id of the other end
_RANK = struct.Struct("<I")


class WireClosedError(Exception):
    """The other end of a Wire is closed."""


class Wire(Protocol):
    """Protocol of one end of a connection. Messages arrive in order, whole or not at all."""

    def send(self, message: bytes, timeout_s: float | None) -> None:
        """Send a message. `timeout_s` None means no deadline. Raises TimeoutError if the other end
        does not read in time, and WireClosedError if that end is closed."""
        ...

    def receive(self, timeout_s: float | None) -> bytes:
        """Wait for the next message. `timeout_s` None means no deadline. Raises TimeoutError if no
        message arrives in time, and WireClosedError if the other end is closed."""
        ...

    def has_message(self) -> bool:
        """Return whether a message has arrived, at least in part, or the other end is closed."""
        ...

    def is_closed(self) -> bool:
        """Return whether the other end is closed and all its messages were received."""
        ...

    def close(self) -> None:
        """Close this end. The other end gets WireClosedError. A second call does nothing."""
        ...


class SocketWire:
    """`Wire` over a connected stream socket, which it owns."""

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
            raise WireClosedError(str(error)) from error

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
                raise WireClosedError(str(error)) from error
            if not received:
                raise WireClosedError("connection closed")
            self._received += received
        message = bytes(self._received[_HEADER.size : end])
        del self._received[:end]
        return message

    def _end_of_message(self) -> int | None:
        """Return the offset at which the first received message ends, or None if it is
        incomplete."""
        if len(self._received) < _HEADER.size:
            return None
        end: int = _HEADER.size + _HEADER.unpack_from(self._received)[0]
        return end if end <= len(self._received) else None

    def has_message(self) -> bool:
        is_here = self._end_of_message() is not None
        return is_here or bool(select.select([self._socket], [], [], 0)[0])

    def is_closed(self) -> bool:
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
        """Send an open socket to the other end's `receive_socket`. For Unix sockets. Raises
        OSError."""
        socket.send_fds(self._socket, [b"\0"], [passed.fileno()])

    def receive_socket(self, timeout_s: float) -> socket.socket:
        """Return the socket that the other end sends with `send_socket`. Raises WireClosedError if
        the other end is closed or sends no socket within `timeout_s`."""
        self._socket.settimeout(timeout_s)
        try:
            _, descriptors, _, _ = socket.recv_fds(self._socket, 1, 1)
        except OSError as error:
            raise WireClosedError(str(error)) from error
        if len(descriptors) != 1:
            raise WireClosedError("connection closed")
        return socket.socket(fileno=descriptors[0])

    def close(self) -> None:
        self._socket.close()


# ---- ranks in a trainer's processes


def this_machine() -> str:
    """Return text that identifies this machine: its host name and boot id."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        return f"{socket.gethostname()} ({file.read().strip()})"


class RankListener:
    """Accepts the connections of the other ranks at rank 0. `address` is the name of an abstract
    Unix socket, which only processes of this machine can reach. Only processes of this process's
    user are accepted."""

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.bind("")  # the system chooses an abstract name
        self._socket.listen()
        self.address: bytes = self._socket.getsockname()

    def wires(self, size: int, timeout_s: float) -> list[SocketWire]:
        """Wait until ranks 1 to `size` - 1 have connected, and return their wires in the order of
        ranks. Raises LockstepError, naming the missing ranks, if a rank does not connect within
        `timeout_s`."""
        wires: dict[int, SocketWire] = {}
        deadline = time.monotonic() + timeout_s
        while len(wires) < size - 1:
            self._socket.settimeout(max(1e-3, deadline - time.monotonic()))
            try:
                accepted, _ = self._socket.accept()
                if _is_own_user(accepted):
                    wire = SocketWire(accepted)
                    message = wire.receive(max(1e-3, deadline - time.monotonic()))
                    wires[_RANK.unpack(message)[0]] = wire
                else:
                    accepted.close()
            except (TimeoutError, WireClosedError) as error:
                missing = sorted({*range(1, size)} - wires.keys())
                raise LockstepError(
                    f"ranks {missing} did not connect to rank 0 within {timeout_s:g} s ({error})"
                ) from error
        return [wires[rank] for rank in sorted(wires)]

    def close(self) -> None:
        """Stop accepting ranks. A second call does nothing."""
        self._socket.close()


def wire_to_lead(address: bytes, rank: int, timeout_s: float) -> SocketWire:
    """Return a wire from `rank` to the RankListener at `address`. Raises ConfigError if `rank`
    cannot connect, or if another user listens there."""
    connecting = socket.socket(socket.AF_UNIX)
    try:
        connecting.settimeout(timeout_s)
        connecting.connect(address)
        if not _is_own_user(connecting):
            raise PermissionError("another user listens there")
        wire = SocketWire(connecting)
        wire.send(_RANK.pack(rank), timeout_s)
    except (OSError, WireClosedError) as error:
        connecting.close()
        raise ConfigError(
            f"rank {rank} cannot reach rank 0 over a socket of this machine ({error}); the ranks "
            "of pg_collection.tp must be processes of one user in one network namespace"
        ) from error
    return wire


def _is_own_user(connected: socket.socket) -> bool:
    found = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return bool(_CREDENTIALS.unpack(found)[1] == os.getuid())
