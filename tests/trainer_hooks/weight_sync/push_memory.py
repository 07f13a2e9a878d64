"""Ranks of an FSDP2 trainer that measure what a push takes above their model."""

from __future__ import annotations

import ctypes
import gc
import re
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from tests.contracts.weight_fleet import over_the_wire
from tests.weights.trainer_ranks import gloo_mesh
from trainer_hooks.weight_sync import join_push, weights_of

NUM_LAYERS, WIDTH = 4, 2560
TENSOR_BYTES = 4 * WIDTH * WIDTH  # 25 MiB, and the largest tensor is what a bucket must hold
_M_MMAP_THRESHOLD = -3


def measure(path: Path, rank: int, pipe: Any, make_transport: Callable[[], Any]) -> None:
    """Push three times, with the parent as the engine, and send (what, value) of each push.

    The last message is the peak, in bytes, of the last push above the process's memory before it.
    The first two pushes make the memory that engines read, which remains.
    """
    try:
        # Freed tensors are given back at once: glibc would keep them in its heap.
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, 1 << 20)
        policy = _policy(gloo_mesh(dist.FileStore(str(path), 2), rank, num_ranks=2))
        if rank == 0:
            transport = make_transport()
            peaks = [_peak_of(lambda: _push(transport, policy, pipe)) for _ in range(3)]
            transport.close()
        else:
            peaks = [_peak_of(lambda: join_push(policy)) for _ in range(3)]
        dist.barrier()
        dist.destroy_process_group()
        pipe.send(("peak", peaks[2]))
    except BaseException:
        pipe.send(("error", traceback.format_exc()))


def _policy(mesh: Any) -> nn.Module:
    with torch.device("meta"):
        policy = nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(NUM_LAYERS)])
    for layer in policy:
        fully_shard(layer, mesh=mesh)
    fully_shard(policy, mesh=mesh)
    policy.to_empty(device="cpu")
    for parameter in policy.parameters():
        nn.init.ones_(parameter)
    return policy


def _push(transport: Any, policy: nn.Module, pipe: Any) -> None:
    source = transport.publish(weights_of(policy))
    pipe.send(("source", over_the_wire(source)))
    transport.send(source)
    assert pipe.recv() == "fetched"
    transport.commit()


def _peak_of(work: Callable[[], object]) -> int:
    """Return the peak number of bytes of the process during `work`, above those before it."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = _status_bytes("VmRSS")
    work()
    return _status_bytes("VmHWM") - before


def _status_bytes(key: str) -> int:
    status = Path("/proc/self/status").read_text()
    found = re.search(rf"{key}:\s+(\d+) kB", status)
    assert found is not None
    return int(found[1]) * 1024
