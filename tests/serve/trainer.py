"""A trainer in a process of its own: rank 0 of a gloo group, which broadcasts on demand."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import (
    PrefixStore,
    _new_process_group_helper,
    _world,
    rendezvous,
)

from tests.processes import PROCESSES

_TIMEOUT = timedelta(seconds=60)
ANSWER_S = 120.0


class Trainer:
    """Its process ends with `close`, or on the command to broadcast None: then it is killed in
    the middle.
    """

    def __init__(self) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self._pipe, theirs = PROCESSES.Pipe()
        self.process = PROCESSES.Process(target=_run, args=(theirs,), daemon=True)
        self.process.start()
        theirs.close()

    def begin_join(self, name: str, world_size: int = 2) -> None:
        """Make the group `name`; `end` waits until the others have joined."""
        self._pipe.send(("join", self.port, name, world_size))

    def begin_broadcast(self, tensors: Sequence[Tensor | None]) -> None:
        """Broadcast tensors one by one."""
        self._pipe.send(("broadcast", list(tensors)))

    def end(self) -> str:
        """Wait for the end of what was begun: "", or its error."""
        assert self._pipe.poll(ANSWER_S), "the trainer does not answer"
        answer: str = self._pipe.recv()
        return answer

    def close(self) -> None:
        self.process.kill()
        self.process.join()
        self._pipe.close()


def _run(pipe: Connection) -> None:
    group: Any = None
    while True:
        try:
            name, *arguments = pipe.recv()
        except EOFError:
            return
        try:
            if name == "join":
                group = _made_group(*arguments)
            else:
                for tensor in arguments[0]:
                    if tensor is None:
                        os._exit(1)
                    dist.broadcast(tensor, src=0, group=group)
        except Exception as error:
            pipe.send(str(error) or "an error")
        else:
            pipe.send("")


def _made_group(port: int, name: str, world_size: int) -> Any:
    """As SGLang's init_custom_process_group, which AReaL and slime have copied."""
    store, rank, world_size = next(
        rendezvous(f"tcp://127.0.0.1:{port}", 0, world_size, timeout=_TIMEOUT)
    )
    store.set_timeout(_TIMEOUT)
    group, _ = _new_process_group_helper(
        world_size,
        rank,
        [],
        "gloo",
        PrefixStore(name, store),
        group_name=name,
        timeout=_TIMEOUT,
    )
    _world.pg_group_ranks[group] = {i: i for i in range(world_size)}
    return group


def announced(tensors: dict[str, Tensor]) -> dict[str, Any]:
    """The names, dtypes and shapes as vLLM's update_info has them."""
    return {
        "names": list(tensors),
        "dtype_names": [str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()],
        "shapes": [list(tensor.shape) for tensor in tensors.values()],
    }


def packed(tensors: Sequence[Tensor]) -> Tensor:
    """One tensor of all their bytes, as trainers of vLLM and SGLang send it."""
    return torch.cat([tensor.contiguous().view(-1).view(torch.uint8) for tensor in tensors])
