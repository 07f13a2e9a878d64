"""Ranks find rank 0 on this machine, or say what keeps them from it."""

from __future__ import annotations

import os
import socket
import struct

import pytest

from rollout.errors import ConfigError, LockstepError
from rollout.parallel import rank_sockets
from rollout.parallel.rank_sockets import RankListener, wire_to_lead


def test_ranks_that_dial_in_any_order_are_told_apart() -> None:
    listener = RankListener()
    dialled = {rank: wire_to_lead(listener.address, rank, 60.0) for rank in (3, 1, 2)}
    wires = listener.wires(4, 60.0)
    for rank, wire in dialled.items():
        wire.send(b"%d" % rank, 60.0)
    assert [wire.receive(60.0) for wire in wires] == [b"1", b"2", b"3"]
    for wire in (*wires, *dialled.values()):
        wire.close()
    listener.close()


def test_a_rank_that_does_not_dial_is_named() -> None:
    listener = RankListener()
    first = wire_to_lead(listener.address, 1, 60.0)
    with pytest.raises(LockstepError, match=r"ranks \[2\] did not dial rank 0 within 0\.01 s"):
        listener.wires(3, 0.01)
    first.close()
    listener.close()


def test_a_rank_0_that_is_not_there_is_a_fault_of_the_configuration() -> None:
    listener = RankListener()
    listener.close()
    with pytest.raises(ConfigError, match="rank 1 cannot reach rank 0"):
        wire_to_lead(listener.address, 1, 60.0)


def test_users_of_any_number_are_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    """As those of containers with a range of their own."""
    user = 2**32 - 2

    class Connected:
        def getsockopt(self, level: int, option: int, size: int) -> bytes:
            assert (level, option, size) == (socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
            return struct.pack("=iII", 1, user, user)

    monkeypatch.setattr(os, "getuid", lambda: user)
    assert rank_sockets._is_own_user(Connected())  # type: ignore[arg-type]
    monkeypatch.setattr(os, "getuid", lambda: user + 1)
    assert not rank_sockets._is_own_user(Connected())  # type: ignore[arg-type]
