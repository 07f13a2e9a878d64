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
    options = distributed.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return distributed.ProcessGroupNCCL(store, rank, world_size, options), device
