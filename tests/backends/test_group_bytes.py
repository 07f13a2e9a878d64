"""all_gather_bytes and broadcast_bytes transfer bytes unchanged, and unpickle nothing."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from rollout.backends.group_bytes import all_gather_bytes, broadcast_bytes
from tests.processes import PROCESSES
from tests.unpickled_code import RunsCode
from trainer_hooks.weight_sync.trainer_ranks import TrainerRanks

NUM_RANKS = 2
CONTENTS = [[b"", b""], [b"a", b""], [b"", b"bc"], [bytes(range(256)), b"\0" * 1000]]
WORDS: list[Any] = [
    ("save",),
    ("load", "a path"),
    ("update", {"tokens": torch.arange(6).view(2, 3), "version": 3, "none": None}, 7),
    None,
]


def join(path: Path, rank: int) -> TrainerRanks:
    dist.init_process_group(
        "gloo", store=dist.FileStore(str(path), NUM_RANKS), rank=rank, world_size=NUM_RANKS
    )
    return TrainerRanks(rank=rank, size=NUM_RANKS)


def be_rank_0(path: Path, trap: Path, pipe: Any) -> None:
    ranks = join(path, 0)
    for contents in CONTENTS:
        pipe.send(all_gather_bytes(None, contents[0]) == contents)
        broadcast_bytes(None, contents[0])
    for word in WORDS:
        ranks.broadcast(word)
    pipe.send(ranks.gather([({"loss": 0.5}, 3)]) == [({"loss": 0.5}, 3), ({"loss": 1.5}, 4)])
    broadcast_bytes(None, pickle.dumps(RunsCode(trap), protocol=2))
    dist.destroy_process_group()


@pytest.fixture
def rank_1(tmp_path: Path) -> Iterator[tuple[TrainerRanks, Any]]:
    """Return this process's rank, and the pipe on which rank 0 reports success."""
    here, there = PROCESSES.Pipe()
    arguments = (tmp_path / "store", tmp_path / "trap", there)
    process = PROCESSES.Process(target=be_rank_0, args=arguments)
    process.start()
    there.close()
    yield join(tmp_path / "store", 1), here
    dist.destroy_process_group()
    process.join()


@pytest.mark.distributed
def test_ranks_send_data_and_run_nothing_that_arrives(
    rank_1: tuple[TrainerRanks, Any], tmp_path: Path
) -> None:
    ranks, line = rank_1
    for contents in CONTENTS:
        assert all_gather_bytes(None, contents[1]) == contents
        assert line.recv()
        assert broadcast_bytes(None) == contents[0]
    for word in WORDS:
        heard = ranks.receive()
        if word is not None and word[0] == "update":
            assert torch.equal(heard[1].pop("tokens"), word[1]["tokens"])
            assert heard == ("update", {"version": 3, "none": None}, 7)
        else:
            assert heard == word
    ranks.gather([({"loss": 1.5}, 4)])
    assert line.recv()
    with pytest.raises(pickle.UnpicklingError):
        ranks.receive()
    assert not (tmp_path / "trap").exists()
