"""TrainerRanks: the data-parallel ranks of a trainer. Rank 0 has the rollouts and leads.

Used by `learner`, `main` and `run_files` of `trainer_hooks.train`, and by `guarded_step`,
`micro_batches` and `reference` of `trainer_hooks.update`. All ranks get the same batch, and each
computes some of its forward passes. Rank 0 broadcasts what to do next.
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from rollout.backends.group_bytes import all_gather_bytes, broadcast_bytes
from rollout.errors import ConfigError

# Timeout of a broadcast by rank 0, which can itself wait for rollouts.
_FOREVER = timedelta(days=365)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerRanks:
    """This process's rank among the `size` ranks of a trainer, and their collectives.

    `message_group`: process group for the messages of rank 0. Other collectives use the default
    group of torch.distributed.
    """

    rank: int = 0
    size: int = 1
    message_group: Any = None

    def broadcast(self, message: Any) -> None:
        """Send `message` and the state of torch's generator from rank 0 to all other ranks.

        Has no effect on other ranks. `message`: tensors, numbers, text, tuples, lists and dicts,
        which run no code when read.
        """
        if self.size > 1 and self.rank == 0:
            broadcast_bytes(self.message_group, _encoded((message, torch.get_rng_state())))

    def receive(self) -> Any:
        """Wait on a rank above 0 for the next message of rank 0, and return it.

        Sets torch's generator to rank 0's state.
        """
        message, random_state = _decoded(broadcast_bytes(self.message_group))
        torch.set_rng_state(random_state)
        return message

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum `tensor` over all ranks, in place, and return it."""
        if self.size > 1:
            dist.all_reduce(tensor)
        return tensor

    def gather(self, own: list[Any]) -> list[Any]:
        """Return the lists of all ranks, concatenated. Elements are as for `broadcast`."""
        if self.size == 1:
            return own
        parts = all_gather_bytes(None, _encoded(own))
        return [each for part in parts for each in _decoded(part)]


ALONE = TrainerRanks()


def _encoded(value: Any) -> bytes:
    content = io.BytesIO()
    torch.save(value, content)
    return content.getvalue()


def _decoded(content: bytes) -> Any:
    return torch.load(io.BytesIO(content), weights_only=True)


def torchrun_place() -> tuple[int, int]:
    """Return this process's rank and number of ranks by torchrun, or (0, 1) without torchrun."""
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


@contextmanager
def torchrun_ranks() -> Iterator[TrainerRanks]:
    """Yield the ranks that torchrun started, connected by gloo until the block ends.

    The network must be private: messages between ranks are neither signed nor encrypted. Raises
    ConfigError if torchrun did not start this process.
    """
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        raise ConfigError(
            "a sharded trainer needs ranks: start it by torchrun --nproc-per-node N, as in "
            "docs/how-to/cluster.md, or choose trainer.strategy=single"
        )
    dist.init_process_group("gloo")
    try:
        group = dist.new_group(backend="gloo", timeout=_FOREVER)
        yield TrainerRanks(rank=dist.get_rank(), size=dist.get_world_size(), message_group=group)
    finally:
        dist.destroy_process_group()
