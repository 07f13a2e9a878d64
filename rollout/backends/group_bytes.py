"""Collectives of bytes over a torch.distributed group.

Used by `rollout.tensor_parallel.start` and `trainer_hooks.weight_sync.trainer_ranks`, in place of
torch's collectives of objects, which unpickle what arrives and so can run any code.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def all_gather_bytes(group: Any, own: bytes) -> list[bytes]:
    """Return the bytes of each rank, in the order of ranks. All ranks must call this. `group` None
    means the default group. Raises RuntimeError if a rank misses the group's deadline."""
    device, size = _device(group), dist.get_world_size(group)
    length = torch.tensor([len(own)], device=device)
    lengths = [torch.zeros_like(length) for _ in range(size)]
    dist.all_gather(lengths, length, group=group)
    num_bytes = [int(each) for each in lengths]
    padded = torch.zeros(max(num_bytes), dtype=torch.uint8, device=device)
    padded[: len(own)] = _as_tensor(own).to(device)
    gathered = [torch.empty_like(padded) for _ in range(size)]
    dist.all_gather(gathered, padded, group=group)
    return [_as_bytes(each[:n]) for each, n in zip(gathered, num_bytes, strict=True)]


def broadcast_bytes(group: Any, own: bytes | None = None) -> bytes:
    """Return rank 0's bytes on all ranks. All ranks must call this. Rank 0 passes its bytes as
    `own`, and the other ranks pass None. `group` None means the default group. Raises RuntimeError
    if a rank misses the group's deadline."""
    device = _device(group)
    length = torch.tensor([0 if own is None else len(own)], device=device)
    source = 0 if group is None else dist.get_global_rank(group, 0)
    dist.broadcast(length, source, group=group)
    if own is None:
        content = torch.empty(int(length), dtype=torch.uint8, device=device)
    else:
        content = _as_tensor(own).to(device)
    dist.broadcast(content, source, group=group)
    return _as_bytes(content)


def _device(group: Any) -> str:
    return "cuda" if dist.get_backend(group) == "nccl" else "cpu"


def _as_tensor(content: bytes) -> Tensor:
    if not content:  # which frombuffer refuses
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


def _as_bytes(content: Tensor) -> bytes:
    return content.cpu().numpy().tobytes()
