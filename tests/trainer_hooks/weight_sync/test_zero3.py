"""Weights that DeepSpeed partitions (ZeRO stage 3) are read whole, on all ranks."""

from __future__ import annotations

import socket

import pytest

from tests.processes import PROCESSES
from tests.trainer_hooks.weight_sync.trainers import BUFFER, digests, model_with_a_buffer, received
from tests.trainer_hooks.weight_sync.zero3_ranks import read_partitions
from trainer_hooks import full_tensors

pytest.importorskip("deepspeed", reason="ZeRO-3 needs DeepSpeed")


def free_address() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


@pytest.mark.distributed
def test_partitioned_weights_are_whole_before_and_after_a_step() -> None:
    address, ends = free_address(), []
    for rank in range(2):
        mine, theirs = PROCESSES.Pipe()
        process = PROCESSES.Process(target=read_partitions, args=(address, rank, theirs))
        process.start()
        theirs.close()
        ends.append((process, mine))
    try:
        readings = [dict(received(pipe)) for _, pipe in ends]
    finally:
        for process, _ in ends:
            process.join(30)
            process.kill()
            process.join()
    before = digests(full_tensors(model_with_a_buffer()))
    for reading in readings:
        assert "error" not in reading, reading["error"]
        assert reading["is partitioned"]
        assert reading["engine"] == reading["module"] == before
        assert reading["gathered at once"] == 1
        after, masters = reading["trained"], reading["masters"]
        assert after.keys() == before.keys() == masters.keys() | {BUFFER}
        assert all(after[name] == masters[name] != before[name] for name in masters)
