"""open_store and connect_store: a store listens at its own address only."""

from __future__ import annotations

import math
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from rollout.backends.process_groups import RankRendezvous
from rollout.launch import torchrun
from rollout.parallel.stores import connect_store, open_store
from rollout.weights.transports.collective import CollectiveTransport

pytestmark = pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="reads /proc/net/tcp")
LISTENS = "0A"
LOOPBACK = "0100007F"


def listeners() -> set[tuple[str, int]]:
    """(address as /proc has it, port) of every socket of this machine that listens."""
    found = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            _, local, _, state, *_ = line.split()
            address, port = local.split(":")
            if state == LISTENS:
                found.add((address, int(port, 16)))
    return found


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


@contextmanager
def of_a_transport() -> Iterator[int]:
    transport = CollectiveTransport("127.0.0.1")
    try:
        yield transport._port
    finally:
        transport.close()


@contextmanager
def of_a_rendezvous() -> Iterator[int]:
    rendezvous = RankRendezvous("cuda", 2, timeout_s=60.0)
    yield int(rendezvous.address)
    rendezvous.close()


@contextmanager
def of_rank_0_without_an_agent() -> Iterator[int]:
    port = free_port()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}.items():
            patch.setenv(name, value)
        for name in ("RANK", "TORCHELASTIC_USE_AGENT_STORE"):
            patch.delenv(name, raising=False)
        store = torchrun._store()
        yield port
        del store


@pytest.mark.parametrize("opened", [of_a_transport, of_a_rendezvous, of_rank_0_without_an_agent])
def test_open_store_listens_at_loopback_alone(opened: Callable[[], Any]) -> None:
    with opened() as port:
        assert {address for address, number in listeners() if number == port} == {LOOPBACK}


def test_rank_rendezvous_waits_for_rank_0_for_its_timeout_s() -> None:
    with pytest.raises(RuntimeError, match="100ms"):
        RankRendezvous("cuda", 2, str(free_port()), timeout_s=0.1)
    RankRendezvous("cuda", 2, timeout_s=math.inf).close()


def test_tcp_store_of_torch_listens_at_every_address() -> None:
    """Which is why it is not used; once this fails, `open_store` may go."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    addresses = {address for address, port in listeners() if port == store.port}
    assert addresses - {LOOPBACK}


def test_connect_store_reaches_a_store_at_its_port() -> None:
    store, port = open_store("127.0.0.1", 60.0)
    connect_store("127.0.0.1", port, 60.0).set("key", "value")
    assert store.get("key") == b"value"
    with pytest.raises(OSError, match=str(os.strerror(98))):
        open_store("127.0.0.1", 60.0, port)
