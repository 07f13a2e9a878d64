"""Process groups of torch.distributed, and the rendezvous of an engine's ranks.

Used by `rollout.tensor_parallel.start`, `rollout.weights.transports.buckets`, and the servers'
weight routes in `rollout.serve.control.receiver` and `rollout.serve.sglang.control`. Opens sockets
and shared memory.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from rollout.parallel.collectives import Collectives, GroupCollectives
from rollout.parallel.shared_collectives import SharedCollectives, shared_by_ranks
from rollout.parallel.shared_memory import SharedMemory, open_shared
from rollout.parallel.stores import connect_store, open_store

_A_DAY_S = 86_400.0  # torch takes no infinite timeout
_LOOPBACK = "127.0.0.1"


def group_backends() -> tuple[str, ...]:
    """Return the torch.distributed backends that this machine supports. No test has run nccl, which
    needs two GPUs."""
    has_nccl = dist.is_nccl_available() and torch.cuda.is_available()
    return ("gloo", "nccl") if has_nccl else ("gloo",)


def join_group(
    backend: str,
    store: Any,
    rank: int,
    world_size: int,
    timeout: timedelta,
    own_host: str | None = None,
) -> tuple[Any, torch.device]:
    """Join a process group, without making a default group. Return the group and the device on
    which its tensors must be.

    `backend` is "gloo" or "nccl". `store` is the torch store in which the ranks publish their
    addresses. `own_host` is the host at which other ranks connect to this rank over Gloo; None
    means the address of the machine's host name.
    """
    distributed: Any = dist  # its type hints lack these classes
    device = torch.device("cuda" if backend == "nccl" else "cpu")
    store = distributed.PrefixStore(f"{device.type}/", store)
    if backend == "nccl":
        options = distributed.ProcessGroupNCCL.Options()
        options._timeout = timeout
        return distributed.ProcessGroupNCCL(store, rank, world_size, options), device
    gloo = distributed.ProcessGroupGloo
    if own_host is None:
        return gloo(store, rank, world_size, timeout), device
    options = gloo._Options()
    options._timeout = timeout
    options._devices = [gloo.create_device(hostname=own_host)]
    return gloo(store, rank, world_size, options), device


class RankRendezvous:
    """Rendezvous of the ranks of one engine on one machine. Ranks on CPUs share memory. Ranks on
    CUDA devices join an NCCL group, which no test has run with more than one rank. The other ranks
    join by `address`, a text."""

    def __init__(
        self, device: str, size: int, address: str | None = None, *, timeout_s: float
    ) -> None:
        """Open the rendezvous (rank 0, no `address`), or join the one at rank 0's `address`.
        `device` is "cpu" or "cuda". `timeout_s` is how long CUDA ranks wait for each other to join;
        it can be infinite. Raises RuntimeError if rank 0 does not answer."""
        self._device, self._size = device, size
        self._shared: SharedMemory | None = None
        self._store: Any = None
        timeout_s = min(timeout_s, _A_DAY_S)
        if device == "cpu":
            if address is None:
                self._shared = shared_by_ranks(size)
                address = self._shared.address
        elif address is None:
            self._store, port = open_store(_LOOPBACK, timeout_s)
            address = str(port)
        else:
            self._store = connect_store(_LOOPBACK, int(address), timeout_s)
        self.address = address

    def collectives(
        self, rank: int, *, timeout_s: float, check: Callable[[], None] = lambda: None
    ) -> Collectives:
        """Join as `rank` and return the rank's collectives. `timeout_s` is the deadline of each
        collective; it can be infinite. `check` is called while a collective waits, and can raise to
        end the wait."""
        if self._device == "cpu":
            memory_N = open_shared(self.address) if self._shared is None else self._shared.bytes_N
            return SharedCollectives(rank, self._size, memory_N, timeout_s=timeout_s, check=check)
        timeout = timedelta(seconds=min(timeout_s, _A_DAY_S))
        group, _ = join_group("nccl", self._store, rank, self._size, timeout)
        return GroupCollectives(group, timeout_s=timeout.total_seconds())

    def close(self) -> None:
        """Close the rendezvous on rank 0. All ranks must have joined."""
        if self._shared is not None:
            self._shared.close()
