"""A child process that joins a trainer's process group and receives broadcasts into shared memory.

`rollout.serve.control.process_group` starts this module as a program. Gloo ends the whole process
if a message is longer than the receiving tensor, and it cannot cancel a waiting call. A separate
process can end or be killed without harm to the server.
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rollout.backends.process_groups import join_group
from rollout.child_process import run_child
from rollout.errors import WeightUpdateError, encode_error
from rollout.parallel.stores import connect_store


def receive_broadcasts(
    pipe: Connection,
    host: str,
    port: int,
    rank: int,
    world_size: int,
    name: str,
    backend: str,
    timeout_s: float,
) -> None:
    """Join the group, then serve the parent until it closes the pipe. Each message is (path, sizes,
    limit). `path` is the file for the broadcasts in order, or None to drop them. `sizes` are in
    bytes, and `limit` is in seconds. None is sent after joining and after each message. If a
    broadcast fails, the encoded error is sent instead and the function returns."""
    distributed: Any = dist  # the type hints of dist lack PrefixStore
    store = connect_store(host, port, timeout_s, num_clients=world_size)
    # torch and SGLang's init_custom_process_group keep the ranks' addresses under this prefix.
    own_store = distributed.PrefixStore(f"{name}/", distributed.PrefixStore(name, store))
    timeout = timedelta(seconds=timeout_s)
    group, device = join_group(backend, own_store, rank, world_size, timeout)
    pipe.send(None)
    with suppress(EOFError):
        while True:
            path, sizes, limit_s = pipe.recv()
            try:
                _receive(group, device, path, sizes, time.monotonic() + limit_s)
            except (RuntimeError, OSError) as error:  # the ranks no longer make the same calls
                pipe.send(encode_error(WeightUpdateError(str(error))))
                return
            pipe.send(None)


def _receive(
    group: Any, device: torch.device, path: str | None, sizes: Sequence[int], deadline: float
) -> None:
    is_on_host = device.type == "cpu"
    start, bytes_N = 0, None if path is None else _mapped(path, sum(sizes))
    for size in sizes:
        if bytes_N is None or not is_on_host:
            part_N = torch.empty(size, dtype=torch.uint8, device=device)
        else:
            part_N = bytes_N[start : start + size]
        options = dist.BroadcastOptions()
        options.rootRank = 0
        options.timeout = timedelta(seconds=max(0.001, deadline - time.monotonic()))
        group.broadcast([part_N], options).wait()
        if bytes_N is not None and not is_on_host:
            bytes_N[start : start + size].copy_(part_N)  # waits for the device
        start += size


def _mapped(path: str, num_bytes: int) -> Tensor:
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        return torch.frombuffer(mmap.mmap(descriptor, max(1, num_bytes)), dtype=torch.uint8)
    finally:
        os.close(descriptor)


if __name__ == "__main__":
    run_child(receive_broadcasts)
