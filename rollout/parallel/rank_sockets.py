"""Sockets between the ranks of an engine that a trainer has started, who know each other by a group
of torch.distributed. Linux only.
"""

from __future__ import annotations

import os
import socket
import struct
import time

from rollout.errors import ConfigError, LockstepError
from rollout.parallel.wire import SocketWire, WireLostError

_CREDENTIALS = struct.Struct("=iII")  # process, user and group of the other end
_RANK = struct.Struct("<I")


def this_machine() -> str:
    """The name of this machine, with what no other one has."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        return f"{socket.gethostname()} ({file.read().strip()})"


class RankListener:
    """Where the other ranks dial rank 0: at `address`, to which the system lets no other machine,
    and this no other user."""

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.bind("")  # a name of the system's choice, in no folder
        self._socket.listen()
        self.address: bytes = self._socket.getsockname()

    def wires(self, size: int, timeout_s: float) -> list[SocketWire]:
        """One wire to each other rank, in their order. Raises LockstepError."""
        wires: dict[int, SocketWire] = {}
        deadline = time.monotonic() + timeout_s
        while len(wires) < size - 1:
            self._socket.settimeout(max(1e-3, deadline - time.monotonic()))
            try:
                dialled, _ = self._socket.accept()
                if _is_own_user(dialled):
                    wire = SocketWire(dialled)
                    word = wire.receive(max(1e-3, deadline - time.monotonic()))
                    wires[_RANK.unpack(word)[0]] = wire
                else:
                    dialled.close()
            except (TimeoutError, WireLostError) as error:
                missing = sorted({*range(1, size)} - wires.keys())
                raise LockstepError(
                    f"ranks {missing} did not dial rank 0 within {timeout_s:g} s ({error})"
                ) from error
        return [wires[rank] for rank in sorted(wires)]

    def close(self) -> None:
        """Nobody can dial any more. A second call does nothing."""
        self._socket.close()


def wire_to_lead(address: bytes, rank: int, timeout_s: float) -> SocketWire:
    """The wire of `rank` to the RankListener at `address`. Raises ConfigError."""
    dialling = socket.socket(socket.AF_UNIX)
    try:
        dialling.settimeout(timeout_s)
        dialling.connect(address)
        if not _is_own_user(dialling):
            raise PermissionError("another user listens there")
        wire = SocketWire(dialling)
        wire.send(_RANK.pack(rank), timeout_s)
    except (OSError, WireLostError) as error:
        dialling.close()
        raise ConfigError(
            f"rank {rank} cannot reach rank 0 over a socket of this machine ({error}); the ranks "
            "of pg_collection.tp are processes of one user in one network namespace"
        ) from error
    return wire


def _is_own_user(connected: socket.socket) -> bool:
    found = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return bool(_CREDENTIALS.unpack(found)[1] == os.getuid())
