"""Ranks in processes of their own, over each kind of Collectives, for tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from rollout.parallel.collectives import Collectives, GroupCollectives
from rollout.parallel.shared_collectives import SharedCollectives, shared_by_ranks
from rollout.parallel.shared_memory import open_shared
from tests.processes import PROCESSES

KINDS = ("shared", "gloo")
TIMEOUT_S = 60.0
Work = Callable[..., Any]


def collectives_of(
    kind: str, rank: int, size: int, place: str, timeout_s: float = TIMEOUT_S
) -> Collectives:
    """`place`: the address of shared memory, or a file where the ranks of a group meet."""
    if kind == "shared":
        assert place is not None
        return SharedCollectives(rank, size, open_shared(place), timeout_s=timeout_s)
    distributed: Any = dist
    store = distributed.FileStore(place, size)
    # The other rank may take long to start: only sums have the deadline of a test.
    group = distributed.ProcessGroupGloo(store, rank, size, timedelta(seconds=TIMEOUT_S))
    return GroupCollectives(group, timeout_s=timeout_s)


class Follower:
    """Rank `rank` in a process, which does `work(collectives, pipe, *arguments)`."""

    def __init__(self, *arguments: Any) -> None:
        self.pipe, theirs = PROCESSES.Pipe()
        self.process = PROCESSES.Process(target=_follow, args=(theirs, *arguments), daemon=True)
        self.process.start()
        theirs.close()


def _follow(
    pipe: Connection, kind: str, rank: int, size: int, place: str, work: Work, arguments: Any
) -> None:
    torch.set_num_threads(1)
    collectives = collectives_of(kind, rank, size, place)
    pipe.send(work(collectives, pipe, *arguments))
    pipe.recv()  # until rank 0 has ended, too
    collectives.close()


@contextmanager
def ranks(
    kind: str,
    directory: Path,
    work: Work,
    *arguments: Any,
    size: int = 2,
    timeout_s: float = TIMEOUT_S,
) -> Iterator[tuple[Collectives, list[Follower]]]:
    """Collectives of rank 0, here, and processes of the others, which do `work`. They end with the
    block."""
    memory = shared_by_ranks(size)
    place = memory.address if kind == "shared" else str(directory / "store")
    followers = [Follower(kind, rank, size, place, work, arguments) for rank in range(1, size)]
    own = collectives_of(kind, 0, size, place, timeout_s)
    try:
        yield own, followers
    finally:
        for follower in followers:
            follower.process.kill()
            follower.process.join()
        own.close()
        memory.close()
