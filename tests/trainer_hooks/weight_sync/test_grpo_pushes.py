"""GRPO under FSDP2 on two ranks: engines serve the full state dict after each step."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.processes import PROCESSES
from tests.trainer_hooks.weight_sync.grpo_ranks import NUM_STEPS, train
from tests.trainer_hooks.weight_sync.trainers import received


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("kind", ["shared", "directory", "collective"])
def test_engines_serve_the_full_state_dict_after_each_step(kind: str, tmp_path: Path) -> None:
    ends = []
    for rank in range(2):
        mine, theirs = PROCESSES.Pipe()
        process = PROCESSES.Process(target=train, args=(tmp_path, rank, theirs, kind))
        process.start()
        theirs.close()
        ends.append((process, mine))
    try:
        of_rank_0, of_rank_1 = ([*received(pipe)] for _, pipe in ends)
    finally:
        for process, _ in ends:
            process.join(30)
            process.kill()
            process.join()
    assert not any(served == "error" for served, _ in of_rank_0), of_rank_0[-1][1]
    assert not of_rank_1, of_rank_1
    assert len({checksum for _, checksum in of_rank_0}) == NUM_STEPS, "each step changes weights"
    assert all(served == [checksum] * 2 for served, checksum in of_rank_0)
