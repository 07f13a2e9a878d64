"""Groups of torch.distributed that a trainer owns, by the device on which their tensors arrive."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist


def group_backends() -> tuple[str, ...]:
    """Return the backends whose groups can be joined here. No test has run nccl: that takes a
    machine with two GPUs."""
    has_nccl = dist.is_nccl_available() and torch.cuda.is_available()
    return ("gloo", "nccl") if has_nccl else ("gloo",)


def joined_group(
    backend: str, places: Any, rank: int, world_size: int, timeout: timedelta
) -> tuple[Any, torch.device]:
    """Return a group without a default group beside it, and the device of its tensors. places: the
    store in which torch keeps the addresses of its ranks."""
    distributed: Any = dist  # whose type hints lack these classes
    device = torch.device("cuda" if backend == "nccl" else "cpu")
    store = distributed.PrefixStore(f"{device.type}/", places)
    if backend == "gloo":
        return distributed.ProcessGroupGloo(store, rank, world_size, timeout), device
    return _nccl_group(store, rank, world_size, timeout), device


def connected_group(
    backend: str, places: Any, rank: int, world_size: int, timeout: timedelta, own_host: str
) -> tuple[Any, torch.device]:
    """As `joined_group`; the other ranks reach this one at `own_host`. Gloo alone would take the
    address that the machine's name has."""
    distributed: Any = dist
    device = torch.device("cuda" if backend == "nccl" else "cpu")
    if backend == "nccl":
        return _nccl_group(places, rank, world_size, timeout), device
    gloo = distributed.ProcessGroupGloo
    options = gloo._Options()
    options._timeout = timeout
    options._devices = [gloo.create_device(hostname=own_host)]
    return gloo(places, rank, world_size, options), device


def _nccl_group(store: Any, rank: int, world_size: int, timeout: timedelta) -> Any:
    distributed: Any = dist
    options = distributed.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return distributed.ProcessGroupNCCL(store, rank, world_size, options)
