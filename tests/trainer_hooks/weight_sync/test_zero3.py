"""Weights that DeepSpeed partitions (ZeRO stage 3) are read whole, on all ranks."""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.processes import PROCESSES
from tests.trainer_hooks.weight_sync.trainers import BUFFER, digests, model_with_a_buffer, received
from tests.trainer_hooks.weight_sync.zero3_ranks import (
    push_partitions,
    pushed_model,
    read_partitions,
    run_as_rank,
)
from trainer_hooks import full_tensors

pytest.importorskip("deepspeed", reason="ZeRO-3 needs DeepSpeed")
pytestmark = pytest.mark.distributed


def free_address() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


def reports_of_ranks(work: Callable[..., None], *arguments: Any) -> list[dict[str, Any]]:
    """Return the messages of each of two ranks that run `work`."""
    address, ends = free_address(), []
    for rank in range(2):
        mine, theirs = PROCESSES.Pipe()
        words = (work, address, rank, theirs, *arguments)
        process = PROCESSES.Process(target=run_as_rank, args=words)
        process.start()
        theirs.close()
        ends.append((process, mine))
    try:
        reports = [dict(received(pipe)) for _, pipe in ends]
    finally:
        for process, _ in ends:
            process.join(30)
            process.kill()
            process.join()
    for report in reports:
        assert "error" not in report, report["error"]
    return reports


def test_partitioned_weights_are_whole_before_and_after_a_step() -> None:
    before = digests(full_tensors(model_with_a_buffer()))
    for reading in reports_of_ranks(read_partitions):
        assert reading["is partitioned"]
        assert reading["engine"] == reading["module"] == before
        assert reading["gathered at once"] == 1
        after, masters = reading["trained"], reading["masters"]
        assert after.keys() == before.keys() == masters.keys() | {BUFFER}
        assert all(after[name] == masters[name] != before[name] for name in masters)


@pytest.mark.timeout(600)
def test_engine_processes_serve_deepspeeds_own_state_dict_after_each_push(tmp_path: Path) -> None:
    pushed_model().save_pretrained(tmp_path)
    of_rank_0, _ = reports_of_ranks(push_partitions, tmp_path)
    assert [transport.partition(":")[0] for transport in of_rank_0] == [
        "shared",
        "directory",
        "collective",
    ]
    assert len({served for served, _ in of_rank_0.values()}) == 3, "each step changes weights"
    assert all(served == whole for served, whole in of_rank_0.values())
