"""Two processes of a made-up trainer in a gloo group, whose LLMs are the ranks of one engine."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rollout import LLM
from rollout.errors import decode_error, encode_error
from tests.processes import PROCESSES

SIZE = 2
Call = tuple[Any, ...]  # the name of a method of LLM, or of a function below, and its arguments


class TrainerRank:
    """One process, which does what it is told."""

    def __init__(self, rank: int, directory: Path) -> None:
        self._pipe, theirs = PROCESSES.Pipe()
        given = (theirs, rank, str(directory / "store"))
        self.process = PROCESSES.Process(target=_be_rank, args=given, daemon=True)
        self.process.start()
        theirs.close()

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    def begin(self, *call: Any) -> None:
        self._pipe.send_bytes(pickle.dumps(call))

    def end(self) -> Any:
        """What the call returned, or the error that it raised."""
        return pickle.loads(self._pipe.recv_bytes())

    def call(self, *call: Any) -> Any:
        self.begin(*call)
        return self.end()


class TrainerRanks:
    """All of them; they may have one LLM after the other. A call returns what each rank has
    returned or raised."""

    def __init__(self, directory: Path) -> None:
        self.ranks = [TrainerRank(rank, directory) for rank in range(SIZE)]

    def make(
        self, model: Any, of_rank_1: Mapping[str, Any] | None = None, **config: Any
    ) -> list[Any]:
        """Have each make its LLM. `model`: of rollout.models, for all ranks."""
        pickled = pickle.dumps(model)
        configs = [config, {**config, **(of_rank_1 or {})}]
        return self.call_each([("make", pickled, each) for each in configs])

    def call(self, *call: Any) -> list[Any]:
        return self.call_each([call] * SIZE)

    def call_each(self, calls: Sequence[Call]) -> list[Any]:
        for rank, call in zip(self.ranks, calls, strict=True):
            rank.begin(*call)
        return [rank.end() for rank in self.ranks]


@contextmanager
def trainer_ranks(directory: Path) -> Iterator[TrainerRanks]:
    """They end with the block."""
    ranks = TrainerRanks(directory)
    try:
        yield ranks
    finally:
        for rank in ranks.ranks:
            rank.process.kill()
            rank.process.join()


# ---- in a rank


def _be_rank(pipe: Connection, rank: int, store: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=SIZE)
    group = dist.new_group(range(SIZE))  # the default group is the trainer's
    llm: Any = None
    while True:
        method, *given = pickle.loads(pipe.recv_bytes())
        try:
            if method == "make":
                model, config = given
                pg_collection = SimpleNamespace(tp=group)
                llm = LLM(pickle.loads(model), pg_collection=pg_collection, **config)
                answer = None
            elif method in _OWN_METHODS:
                answer = _OWN_METHODS[method](llm, rank, *given)
            else:
                answer = getattr(llm, method)(*given)
        except BaseException as error:  # a KeyboardInterrupt, too
            answer = decode_error(encode_error(error))
        pipe.send_bytes(pickle.dumps(answer))


def read(llm: LLM, rank: int) -> tuple[str, int]:
    """What the LLM says of itself."""
    return llm.state.value, llm.weights_version


def sum_ranks(llm: LLM, rank: int) -> int:
    """A sum in the trainer's own group, which does not depend on the engine."""
    total = torch.tensor([rank + 1])
    dist.all_reduce(total)
    return int(total)


def hurry(llm: Any, rank: int, timeout_s: float) -> None:
    """From now on wait only so long for another rank to make a call."""
    waiting = llm._ranks._rank if rank else llm._ranks._executor
    waiting._start_timeout_s = timeout_s


def push_shards(llm: LLM, rank: int, tensors: Mapping[str, Tensor]) -> Any:
    """Update with tensors that both ranks hold parts of, as FSDP2 has them."""
    # Takes seconds, which most ranks need not spend.
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (SIZE,))
    return llm.update_weights(
        {name: distribute_tensor(tensor, mesh, [Shard(0)]) for name, tensor in tensors.items()}
    )


def push_or_fail(
    llm: LLM, rank: int, tensors: Mapping[str, Tensor], failing: int, kind: str
) -> Any:
    """Update with an iterator that fails on rank `failing` after half of the tensors."""

    def pairs() -> Iterator[tuple[str, Tensor]]:
        for number, pair in enumerate(tensors.items()):
            if rank == failing and number == len(tensors) // 2:
                if kind == "exit":
                    os._exit(1)
                if kind == "interrupt":
                    raise KeyboardInterrupt
                raise OSError("the trainer's disk is gone")
            yield pair

    return llm.update_weights(pairs())


_OWN_METHODS: Mapping[str, Callable[..., Any]] = {
    work.__name__: work for work in (read, sum_ranks, hurry, push_shards, push_or_fail)
}
