"""Collectives: sums and gathers over the ranks of one engine, passed to whatever needs them."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Protocol

import torch
from torch import Tensor

from rollout.errors import LockstepError

# Are summed in float32 and rounded once, whatever the number of ranks.
HALF_TYPES = (torch.bfloat16, torch.float16)


class CollectiveAbortedError(Exception):
    """Another rank has failed, so this one does not wait for it. The failed rank says why."""


class Collectives(Protocol):
    """Of one rank. One thread calls them, in the same order and with the same shapes on all ranks.

    A call returns when all ranks have made it. It raises CollectiveAbortedError once another rank
    has called `abort`, and LockstepError where a rank is lost or does not come in time.
    """

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    @property
    def wait_seconds(self) -> float:
        """How long this rank has waited for the others, as far as its host waits."""
        ...

    def all_reduce_(self, x: Tensor) -> Tensor:
        """Put the sum of `x`, contiguous, over all ranks in its place; returns it. The same bits on
        all ranks."""
        ...

    def all_gather(self, x: Tensor) -> Tensor:
        """The `x` of each rank, contiguous and of one shape on all: [size, *x.shape]."""
        ...

    def abort(self) -> None:
        """This rank has failed and will not make the calls that the others wait in."""
        ...

    def reset(self) -> None:
        """Begin anew after an `abort`, when no rank is in a call: rank 0 first, then the others.

        Raises LockstepError where that is impossible.
        """
        ...

    def close(self) -> None:
        """Give up what is held. A second call does nothing."""
        ...


class OneRank:
    """Implements `Collectives` where there is nobody else."""

    rank, size, wait_seconds = 0, 1, 0.0

    def all_reduce_(self, x: Tensor) -> Tensor:
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        return x[None]

    def abort(self) -> None:
        """Nobody waits."""

    def reset(self) -> None:
        """Nothing to begin anew."""

    def close(self) -> None:
        """Nothing is held."""


ONE_RANK = OneRank()


def any_rank(collectives: Collectives, is_so: bool, device: torch.device) -> bool:
    """Whether it is so on any rank: a vote of all of them, on what each finds by itself."""
    if collectives.size == 1:
        return is_so
    return bool(collectives.all_reduce_(torch.tensor([int(is_so)], device=device)).item())


class GroupCollectives:
    """Implements `Collectives` over a process group of torch.distributed: gloo or NCCL.

    A group whose rank has failed in a call is lost: `reset` raises then.
    """

    def __init__(self, group: Any, *, timeout_s: float) -> None:
        """`group`: of torch.distributed, which may belong to somebody else. `timeout_s`: of each
        call, in seconds."""
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
        except RuntimeError as error:  # whatever the group's library has to say
            self._is_aborted = True
            raise LockstepError(
                f"rank {self.rank} could not {what} over {self.size} ranks within "
                f"{self._timeout.total_seconds():g} s ({error}); make the engine anew"
            ) from error
        self.wait_seconds += time.perf_counter() - start

    def abort(self) -> None:
        self._is_aborted = True
        if hasattr(self._group, "abort"):  # of NCCL: whoever waits is told
            self._group.abort()

    def reset(self) -> None:
        if self._is_aborted:
            raise LockstepError(
                "a rank failed within a sum, after which a group of torch.distributed cannot go "
                "on; make the engine anew"
            )

    def close(self) -> None:
        """The group is its owner's."""
