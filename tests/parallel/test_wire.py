"""RankListener and wire_to_lead: ranks connect to rank 0 on this machine, or raise the reason."""

from __future__ import annotations

import os
import socket
import struct

import pytest

from rollout.errors import ConfigError, LockstepError
from rollout.parallel import wire
from rollout.parallel.wire import RankListener, wire_to_lead


def test_rank_listener_orders_ranks_that_connect_in_any_order() -> None:
    listener = RankListener()
    connected = {rank: wire_to_lead(listener.address, rank, 60.0) for rank in (3, 1, 2)}
    wires = listener.wires(4, 60.0)
    for rank, end in connected.items():
        end.send(b"%d" % rank, 60.0)
    assert [end.receive(60.0) for end in wires] == [b"1", b"2", b"3"]
    for end in (*wires, *connected.values()):
        end.close()
    listener.close()


def test_rank_listener_names_a_rank_that_does_not_connect() -> None:
    listener = RankListener()
    first = wire_to_lead(listener.address, 1, 60.0)
    with pytest.raises(LockstepError, match=r"ranks \[2\] did not connect .* within 0\.01 s"):
        listener.wires(3, 0.01)
    first.close()
    listener.close()


def test_wire_to_lead_without_rank_0_raises_config_error() -> None:
    listener = RankListener()
    listener.close()
    with pytest.raises(ConfigError, match="rank 1 cannot reach rank 0"):
        wire_to_lead(listener.address, 1, 60.0)


def test_wire_compares_user_ids_as_unsigned(monkeypatch: pytest.MonkeyPatch) -> None:
    """User namespaces of containers have ids above 2**31."""
    user = 2**32 - 2

    class Connected:
        def getsockopt(self, level: int, option: int, size: int) -> bytes:
            assert (level, option, size) == (socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
            return struct.pack("=iII", 1, user, user)

    monkeypatch.setattr(os, "getuid", lambda: user)
    assert wire._is_own_user(Connected())  # type: ignore[arg-type]
    monkeypatch.setattr(os, "getuid", lambda: user + 1)
    assert not wire._is_own_user(Connected())  # type: ignore[arg-type]
