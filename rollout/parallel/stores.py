"""TCP stores of torch.distributed that listen at one address. Each rendezvous of ranks uses one."""

from __future__ import annotations

import socket
from datetime import timedelta
from typing import Any

import torch.distributed as dist


def open_store(host: str, timeout_s: float, port: int = 0) -> tuple[Any, int]:
    """Return a store that listens at `host` alone, and its port. `port`: 0 for a free one.

    TCPStore by itself listens at every address of the machine, whatever host it is given.
    Raises OSError.
    """
    distributed: Any = dist  # whose type hints lack this class
    listener = socket.create_server((host, port), family=_family(host))
    port = listener.getsockname()[1]
    return distributed.TCPStore(
        host,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout_s),
        master_listen_fd=listener.detach(),
    ), port


def connect_store(host: str, port: int, timeout_s: float, num_clients: int | None = None) -> Any:
    """Return a client of the store at `host` and `port`.

    `num_clients`: of a store whose owner waits until so many have connected; None if it does not
    wait. Raises RuntimeError if the store does not answer.
    """
    distributed: Any = dist
    return distributed.TCPStore(
        host,
        port,
        num_clients,
        is_master=False,
        wait_for_workers=num_clients is not None,
        timeout=timedelta(seconds=timeout_s),
    )


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
