"""The ranks of a group as threads of this process with a barrier."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import TypeVar

import torch
from torch import Tensor

from rollout.parallel.collectives import Collectives

Result = TypeVar("Result")
TIMEOUT_S = 60.0  # of a rank that waits for one that has failed


class Rendezvous:
    """Exchange of one tensor for each of `size` ranks that are threads."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.barrier = Barrier(size, timeout=TIMEOUT_S)
        self.tensors: list[Tensor] = [torch.empty(0)] * size


class ThreadCollectives:
    """Implements the sums and gathers of `Collectives` over a Rendezvous."""

    def __init__(self, rank: int, rendezvous: Rendezvous) -> None:
        self.rank, self.size, self._rendezvous = rank, rendezvous.size, rendezvous
        self.num_calls, self.wait_seconds = 0, 0.0

    def all_reduce_(self, x: Tensor) -> Tensor:
        assert x.is_contiguous()
        return x.copy_(self.all_gather(x).float().sum(0))

    def all_gather(self, x: Tensor) -> Tensor:
        self.num_calls += 1
        rendezvous = self._rendezvous
        rendezvous.tensors[self.rank] = x
        rendezvous.barrier.wait()
        gathered = torch.stack(rendezvous.tensors)
        rendezvous.barrier.wait()  # nobody changes its tensor before all have read it
        return gathered

    def abort(self) -> None:
        self._rendezvous.barrier.abort()

    def reset(self) -> None:
        self._rendezvous.barrier.reset()

    def close(self) -> None:
        pass


def on_ranks(
    size: int, work: Callable[[Collectives], Result], *, num_threads: int = 1
) -> list[Result]:
    """Return what `work` returns on each rank. If it raises on one, the others do not wait for it.

    `num_threads`: torch's, on each rank.
    """
    rendezvous = Rendezvous(size)

    def run(rank: int) -> Result:
        torch.set_num_threads(num_threads)
        try:
            return work(ThreadCollectives(rank, rendezvous))
        except BaseException:
            rendezvous.barrier.abort()
            raise

    if size == 1:
        return [run(0)]
    with ThreadPoolExecutor(size) as pool:
        return [future.result() for future in [pool.submit(run, rank) for rank in range(size)]]
