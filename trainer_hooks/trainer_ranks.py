"""TrainerRanks: the data-parallel ranks of a trainer, of which rank 0 has the rollouts and leads.

All ranks compute an update on the same batch, each its own passes of it. Rank 0 says what is next.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

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

    def tell(self, word: Any) -> None:
        """Rank 0: let the others hear `word`, with the state of torch's generator. They do what it
        means together with this one, which waits for none of them."""
        if self.size > 1 and self.rank == 0:
            dist.broadcast_object_list([(word, torch.get_rng_state())], 0, self.words)

    def hear(self) -> Any:
        """Any other rank: the next word of rank 0, which has drawn as many random numbers."""
        heard: list[Any] = [None]
        dist.broadcast_object_list(heard, 0, self.words)
        word, random_state = heard[0]
        torch.set_rng_state(random_state)
        return word

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum of what each rank has, in place."""
        if self.size > 1:
            dist.all_reduce(tensor)
        return tensor

    def gather(self, own: list[Any]) -> list[Any]:
        """The lists of all ranks, one after the other."""
        if self.size == 1:
            return own
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, own)
        return [each for part in found for each in part]


ALONE = TrainerRanks()


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
