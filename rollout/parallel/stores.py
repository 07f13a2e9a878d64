"""TCPStores of torch.distributed that listen at one address only, and clients of such stores.

Used by `rollout.backends.process_groups`, `rollout.launch.torchrun`,
`rollout.weights.transports.collective`, `rollout.serve.control.receiver` and `rollout_vllm`, where
processes exchange addresses. `open_store` opens a listening socket.
"""

from __future__ import annotations

import socket
from datetime import timedelta
from typing import Any

import torch.distributed as dist


def open_store(host: str, timeout_s: float, port: int = 0) -> tuple[Any, int]:
    """Return a store that listens at `host` only, and its port. `port` 0 chooses a free port.
    Raises OSError if it cannot listen."""
    distributed: Any = dist  # its type hints lack TCPStore
    # TCPStore itself would listen at every address of the machine, whatever `host` is.
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
    """Return a client of the store at `host` and `port`. `num_clients` is the number of clients for
    which the store waits, or None if it waits for none. Raises RuntimeError if the store does not
    answer within `timeout_s`."""
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
