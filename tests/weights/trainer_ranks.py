"""Ranks of a trainer whose weights are sharded over all of them."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from rollout.weights.transports.registry import WeightFetcher
from rollout.weights.transports.shared import SharedTransport
from trainer_hooks.weight_sync import full_tensors


def gloo_mesh(store: dist.Store, rank: int = 0, num_ranks: int = 1) -> DeviceMesh:
    """A mesh over this process and its peers at `store`."""
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=num_ranks, timeout=timedelta(seconds=60)
    )
    return init_device_mesh("cpu", (num_ranks,))


def publish_or_take_part(path: Path, rank: int, pipe: Any) -> None:
    """Rank 0 publishes its shards and those of rank 1, which has no engine.

    Each has its own order of names. Sends whether the whole tensors are right.
    """
    mesh = gloo_mesh(dist.FileStore(str(path), 2), rank, num_ranks=2)
    names = ("c", "a", "b") if rank == 0 else ("b", "c", "a")
    whole = {name: torch.arange(8.0).view(4, 2) + ord(name) for name in names}
    sharded = {
        name: DTensor.from_local(tensor.chunk(2)[rank], mesh, [Shard(0)])
        for name, tensor in whole.items()
    }
    if rank == 0:
        received = WeightFetcher()(SharedTransport().publish(sharded))
    else:
        received = dict(full_tensors(sharded))
    pipe.send(all(torch.equal(received[name], whole[name]) for name in names))
    dist.destroy_process_group()
