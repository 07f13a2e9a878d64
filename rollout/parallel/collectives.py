"""Collectives: sums and gathers over the ranks of one engine.

Used by the model's layers and output head, by CUDA graph capture, and by the worker where all ranks
must agree (`any_rank`). OneRank is for an engine of one rank, GroupCollectives for a process group
of torch.distributed; rollout.parallel.shared_collectives is for ranks that share memory.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Protocol

import torch
from torch import Tensor

from rollout.errors import LockstepError

# Summed in float32 and rounded once, for any number of ranks.
HALF_TYPES = (torch.bfloat16, torch.float16)


class CollectiveAbortedError(Exception):
    """Another rank has failed, so this one stops waiting. The failed rank raises the cause."""


class Collectives(Protocol):
    """Collectives of one rank. One thread calls them, in the same order and with the same shapes on
    all ranks.

    A call returns when all ranks have made it. It raises CollectiveAbortedError after an `abort`,
    and LockstepError if a rank ends or does not call in time.
    """

    @property
    def rank(self) -> int:
        """Number of this rank, from 0."""
        ...

    @property
    def size(self) -> int:
        """Number of ranks."""
        ...

    @property
    def wait_seconds(self) -> float:
        """Time that this rank's host has waited for the others."""
        ...

    def all_reduce_(self, x: Tensor) -> Tensor:
        """Replace the contiguous `x` by its sum over all ranks, and return it. All ranks get the
        same bits."""
        ...

    def all_gather(self, x: Tensor) -> Tensor:
        """Return the `x` of all ranks, [size, *x.shape]. `x` is contiguous and has the same shape
        on all ranks."""
        ...

    def abort(self) -> None:
        """Make the calls of other ranks raise, because this rank has failed and will not join."""
        ...

    def reset(self) -> None:
        """Allow calls again after an `abort`. No rank may be in a call. Rank 0 resets first, then
        the others.

        Raises LockstepError if these collectives cannot be used again.
        """
        ...

    def close(self) -> None:
        """Release the resources held. A second call does nothing."""
        ...


class OneRank:
    """`Collectives` of a single rank."""

    rank, size, wait_seconds = 0, 1, 0.0

    def all_reduce_(self, x: Tensor) -> Tensor:
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        return x[None]

    def abort(self) -> None:
        """Do nothing: no other rank waits."""

    def reset(self) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing: no resource is held."""


ONE_RANK = OneRank()


def any_rank(collectives: Collectives, is_so: bool, device: torch.device) -> bool:
    """Return whether `is_so` is true on any rank. All ranks must call it."""
    if collectives.size == 1:
        return is_so
    return bool(collectives.all_reduce_(torch.tensor([int(is_so)], device=device)).item())


class GroupCollectives:
    """`Collectives` over a process group of torch.distributed: gloo or NCCL.

    With NCCL a call returns at once, and the device's stream waits for the other ranks. An `abort`
    raises CollectiveAbortedError on its own rank and LockstepError on the others, at the latest at
    their deadline. After an `abort` or a failed call, `reset` raises LockstepError.
    """

    def __init__(self, group: Any, *, timeout_s: float) -> None:
        """`group`: a torch.distributed group, which the caller owns. `timeout_s`: deadline of each
        gloo call; an NCCL group has its own."""
        self._group, self._timeout = group, timedelta(seconds=timeout_s)
        self.rank: int = group.rank()
        self.size: int = group.size()
        # Gloo lacks sums of half types on some machines.
        self._sums_halves = group.name() != "gloo"
        self._is_aborted = False
        self.wait_seconds = 0.0

    def all_reduce_(self, x: Tensor) -> Tensor:
        if x.dtype in HALF_TYPES and not self._sums_halves:
            return x.copy_(self.all_reduce_(x.float()))
        self._wait("sum", lambda: self._group.allreduce([x]))
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        gathered = x.new_empty(self.size, *x.shape)
        self._wait("gather", lambda: self._group.allgather([[*gathered.unbind()]], [x]))
        return gathered

    def _wait(self, what: str, begin: Callable[[], Any]) -> None:
        if self._is_aborted:
            raise CollectiveAbortedError
        start = time.perf_counter()
        try:
            work = begin()
            if self._group.name() == "gloo":
                work.wait(self._timeout)
            else:
                work.wait()  # the device waits, by its stream; the host goes on
        except RuntimeError as error:  # whatever the group's library raises
            self._is_aborted = True
            raise LockstepError(
                f"rank {self.rank} could not {what} over {self.size} ranks within "
                f"{self._timeout.total_seconds():g} s ({error}); create a new engine"
            ) from error
        self.wait_seconds += time.perf_counter() - start

    def abort(self) -> None:
        self._is_aborted = True
        if hasattr(self._group, "abort"):  # NCCL: ranks that wait get an error
            self._group.abort()

    def reset(self) -> None:
        if self._is_aborted:
            raise LockstepError(
                "a rank failed within a sum, after which a group of torch.distributed cannot go "
                "on; create a new engine"
            )

    def close(self) -> None:
        """Do nothing: the caller owns the group."""
