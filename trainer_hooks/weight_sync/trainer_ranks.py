"""TrainerRanks: the data-parallel ranks of a trainer, of which rank 0 has the rollouts and leads.

All ranks compute an update on the same batch, each its own passes of it. Rank 0 says what is next.
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

# How long the others wait for a word of rank 0, which may wait for rollouts.
_FOREVER = timedelta(days=365)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerRanks:
    """This rank, of `size`. `words`: the group over which rank 0 says what is next.

    All else goes over the default group of torch.distributed.
    """

    rank: int = 0
    size: int = 1
    words: Any = None

    def broadcast(self, word: Any) -> None:
        """Rank 0: send `word` to the others, with the state of torch's generator. They do what it
        means together with this one, which waits for none of them.

        `word` holds tensors, numbers, text, tuples, lists and dicts: data that runs no code.
        """
        if self.size > 1 and self.rank == 0:
            broadcast_bytes(self.words, _encoded((word, torch.get_rng_state())))

    def receive(self) -> Any:
        """Any other rank: the next word of rank 0, which has drawn as many random numbers."""
        word, random_state = _decoded(broadcast_bytes(self.words))
        torch.set_rng_state(random_state)
        return word

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum of what each rank has, in place."""
        if self.size > 1:
            dist.all_reduce(tensor)
        return tensor

    def gather(self, own: list[Any]) -> list[Any]:
        """Return the lists of all ranks, one after the other. They hold what a word may hold."""
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
    """Raises pickle.UnpicklingError for anything but data."""
    return torch.load(io.BytesIO(content), weights_only=True)


def torchrun_place() -> tuple[int, int]:
    """The rank that torchrun has given to this process, and the number of ranks; (0, 1) without
    torchrun."""
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


@contextmanager
def torchrun_ranks() -> Iterator[TrainerRanks]:
    """The ranks that torchrun has started, connected by gloo.

    The network must be closed to others: what ranks say to each other is neither signed nor hidden.
    Raises ConfigError if torchrun has not started this process.
    """
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        raise ConfigError(
            "a sharded trainer wants ranks: start it by torchrun --nproc-per-node N, as in "
            "docs/how-to/cluster.md, or choose trainer.strategy=single"
        )
    dist.init_process_group("gloo")
    try:
        words = dist.new_group(backend="gloo", timeout=_FOREVER)
        yield TrainerRanks(rank=dist.get_rank(), size=dist.get_world_size(), words=words)
    finally:
        dist.destroy_process_group()
