"""CudaGraphs against torch's rules for pools of graphs, which `fake_graphs` has.

Engines capture on a GPU in `make gpu-check`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rollout.backends.executors.cuda_graph import CudaGraphs
from rollout.step.output import SampleResult, StepOutput
from tests.backends.fake_graphs import GENERAL, WORKSPACE_BYTES, FakeTorchCuda

CPU = torch.device("cpu")
MIB = 1 << 20


def program_on(cuda: FakeTorchCuda, num_bytes: int = MIB) -> Callable[[], StepOutput[Any]]:
    def program() -> StepOutput[Any]:
        cuda.product()
        cuda.allocate_for_a_moment(num_bytes)
        samples = SampleResult(
            token_ids_S=torch.zeros(1, dtype=torch.int64), is_finite_S=torch.ones(1)
        )
        return StepOutput(samples=samples)

    return program


def test_graphs_may_be_captured_again_after_all_of_them_were_dropped() -> None:
    cuda = FakeTorchCuda()
    graphs = CudaGraphs(CPU, cuda)
    for _ in range(3):
        captured = [graphs.capture(program_on(cuda)) for _ in range(2)]
        captured[0][0]()
        captured.clear()
        del captured
        graphs.forget()
    assert cuda.num_captures == 6
    assert cuda.fatal == []


def test_a_workspace_of_cublas_keeps_no_pool_of_graphs_alive() -> None:
    cuda = FakeTorchCuda()
    graphs = CudaGraphs(CPU, cuda)
    captured = graphs.capture(program_on(cuda))
    assert graphs.num_bytes == MIB
    assert cuda.pools[GENERAL].num_live_bytes == WORKSPACE_BYTES
    del captured
    graphs.forget()
    assert graphs.num_bytes == 0
    assert cuda.pools.keys() == {GENERAL}


def test_graphs_share_the_memory_of_one_pool() -> None:
    cuda = FakeTorchCuda()
    graphs = CudaGraphs(CPU, cuda)
    captured = [graphs.capture(program_on(cuda, size * MIB)) for size in (3, 1, 2)]
    assert graphs.num_bytes == 3 * MIB
    assert len(cuda.pools) == 2
    assert len(captured) == 3


def test_a_captured_graph_outlives_its_device() -> None:
    cuda = FakeTorchCuda()
    graphs = CudaGraphs(CPU, cuda)
    replay, _ = graphs.capture(program_on(cuda))
    del graphs
    replay()
    assert cuda.fatal == []
    del replay
    assert cuda.fatal == []
    assert cuda.pools.keys() == {GENERAL}


def test_a_program_that_fails_in_its_capture_leaves_the_pool_usable() -> None:
    cuda = FakeTorchCuda()
    graphs = CudaGraphs(CPU, cuda)
    calls = 0

    def failing() -> StepOutput[Any]:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise RuntimeError("made up")
        return program_on(cuda)()

    with pytest.raises(RuntimeError, match="made up"):
        graphs.capture(failing)
    graphs.capture(program_on(cuda))
    assert cuda.fatal == []


@given(
    steps=st.lists(st.sampled_from(["capture", "drop one", "drop all", "forget", "replay"])),
)
def test_no_history_of_captures_breaks_torchs_rules(steps: list[str]) -> None:
    cuda = FakeTorchCuda()
    graphs = CudaGraphs(CPU, cuda)
    captured: list[Any] = []
    for step in steps:
        if step == "capture":
            captured.append(graphs.capture(program_on(cuda)))
        elif step == "drop one" and captured:
            captured.pop()
        elif step == "drop all":
            captured.clear()
        elif step == "forget":
            graphs.forget()
        replay_all(captured)
    captured.clear()
    del graphs
    assert cuda.fatal == []
    assert cuda.pools.keys() == {GENERAL}


def replay_all(captured: list[Any]) -> None:
    for replay, _ in captured:
        replay()
