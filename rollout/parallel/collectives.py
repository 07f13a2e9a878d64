"""Collectives: sums and gathers over the ranks of one engine.

Used by `rollout.backends`, `rollout.layers`, `rollout.models`, `rollout.worker` and
`rollout.tensor_parallel`. OneRank serves an engine of one rank. `rollout.backends.process_groups`
makes GroupCollectives over a torch.distributed group, or SharedCollectives
(`rollout.parallel.shared_collectives`) over shared memory.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Protocol

import torch
from torch import Tensor

from rollout.errors import LockstepError

# Except by NCCL, these are summed in float32 and rounded once, for any number of ranks.
HALF_TYPES = (torch.bfloat16, torch.float16)


class CollectiveAbortedError(Exception):
    """Another rank has failed and aborted a collective. The other rank raises the cause."""


class Collectives(Protocol):
    """Protocol of one rank's access to collective operations.

    All ranks make the same calls with the same shapes, in the same order, each from one thread. A
    call returns when all ranks have made it. It raises CollectiveAbortedError after an `abort`, and
    LockstepError if a rank ends or does not call in time. GroupCollectives raises them in other
    cases."""

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
        """Total seconds that this rank's host has waited for other ranks."""
        ...

    def all_reduce_(self, x: Tensor) -> Tensor:
        """Replace the contiguous `x` by its sum over all ranks, and return it. All ranks get the
        same bits."""
        ...

    def all_gather(self, x: Tensor) -> Tensor:
        """Return the `x` of all ranks, [size, *x.shape]. `x` must be contiguous."""
        ...

    def abort(self) -> None:
        """Make calls of the other ranks raise, because this rank has failed and will not join
        them."""
        ...

    def reset(self) -> None:
        """Allow calls again after an `abort`. Rank 0 resets first. No rank may be in a call. Raises
        LockstepError if these collectives cannot be used again."""
        ...

    def close(self) -> None:
        """Release resources. A second call does nothing."""
        ...


class OneRank:
    """`Collectives` of a single rank, where a sum is `x` itself."""

    rank, size, wait_seconds = 0, 1, 0.0

    def all_reduce_(self, x: Tensor) -> Tensor:
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        return x[None]

    def abort(self) -> None:
        """Do nothing, since there is no other rank."""

    def reset(self) -> None:
        """Do nothing, since nothing was aborted."""

    def close(self) -> None:
        """Do nothing, since no resource is held."""


ONE_RANK = OneRank()


def any_rank(collectives: Collectives, is_so: bool, device: torch.device) -> bool:
    """Return whether `is_so` is true on any rank. All ranks must call it. With several ranks it
    waits for `device`."""
    if collectives.size == 1:
        return is_so
    return bool(collectives.all_reduce_(torch.tensor([int(is_so)], device=device)).item())


class GroupCollectives:
    """`Collectives` over a process group of torch.distributed: gloo or NCCL.

    With NCCL a call returns at once, and the device's stream waits for the other ranks. After
    `abort`, calls of the aborting rank raise CollectiveAbortedError. Calls of other ranks then
    raise LockstepError, at their deadline at the latest. After an `abort` or a failed call, `reset`
    raises LockstepError."""

    def __init__(self, group: Any, *, timeout_s: float) -> None:
        """`group` is a torch.distributed process group, which the caller owns. `timeout_s` is the
        deadline of each gloo call. An NCCL group has its own deadline."""
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
                work.wait()  # the device's stream waits, the host does not
        except RuntimeError as error:  # what gloo and NCCL raise
            self._is_aborted = True
            raise LockstepError(
                f"rank {self.rank} could not {what} over {self.size} ranks within "
                f"{self._timeout.total_seconds():g} s ({error}); create a new engine"
            ) from error
        self.wait_seconds += time.perf_counter() - start

    def abort(self) -> None:
        self._is_aborted = True
        if hasattr(self._group, "abort"):  # NCCL: waiting ranks get an error
            self._group.abort()

    def reset(self) -> None:
        if self._is_aborted:
            raise LockstepError(
                "a rank failed during a collective, and a torch.distributed group cannot be used "
                "after that; create a new engine"
            )

    def close(self) -> None:
        """Do nothing, since the caller owns the group."""
