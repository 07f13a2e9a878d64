"""CudaGraphs against torch's rules for memory pools of graphs, as fake_graphs.py implements them.

Engines capture on a GPU in `make gpu-check`.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rollout.backends.cuda.cuda_graph import CudaGraphs
from rollout.backends.cuda.graph import CaptureError
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


def failing_in_capture(cuda: FakeTorchCuda, fail: Callable[[], object]) -> Callable[[], Any]:
    """Return a program that allocates memory and then, if it is being captured, calls `fail`."""
    program = program_on(cuda)

    def failing() -> StepOutput[Any]:
        output = program()
        if cuda.is_capturing:
            fail()
        return output

    return failing


def raise_value_error() -> None:
    raise ValueError("made up")


def test_a_program_that_raises_in_a_valid_capture_leaves_the_pool_usable() -> None:
    cuda = FakeTorchCuda()
    graphs = CudaGraphs(CPU, cuda)
    with pytest.raises(CaptureError) as caught:
        graphs.capture(failing_in_capture(cuda, raise_value_error))
    assert str(caught.value.__cause__) == "made up"
    del caught
    captured = graphs.capture(program_on(cuda))
    assert graphs.num_bytes == MIB
    assert len(cuda.pools) == 2
    del captured
    graphs.forget()
    assert graphs.num_bytes == 0
    assert cuda.fatal == []


def test_a_capture_that_cuda_invalidates_raises_the_first_error_and_keeps_its_pool() -> None:
    """Torch would end the process if the pool were freed; later captures take a pool of their
    own, and the allocator gives cached memory back as before."""
    cuda = FakeTorchCuda()
    graphs = CudaGraphs(CPU, cuda)
    before = graphs.capture(program_on(cuda))
    stream = cuda.current_stream()
    with pytest.raises(CaptureError) as caught:
        graphs.capture(failing_in_capture(cuda, cuda.synchronize))
    assert str(caught.value.__cause__) == "operation not permitted when stream is capturing"
    del caught
    assert cuda.current_stream() is stream
    assert graphs.num_bytes == MIB  # of the pool that is kept
    after = graphs.capture(program_on(cuda, 3 * MIB))
    assert graphs.num_bytes == 4 * MIB
    for replay, _ in (before, after):
        replay()
    del before, after, replay
    graphs.forget()
    assert graphs.num_bytes == MIB
    cuda.allocate_for_a_moment(MIB)
    cuda.empty_cache()
    assert cuda.pools[GENERAL].num_cached_bytes == 0
    del graphs
    gc.collect()
    assert cuda.fatal == []


def test_a_capture_that_is_interrupted_raises_the_interrupt() -> None:
    cuda = FakeTorchCuda()
    graphs = CudaGraphs(CPU, cuda)

    def interrupt() -> None:
        with contextlib.suppress(RuntimeError):
            cuda.synchronize()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        graphs.capture(failing_in_capture(cuda, interrupt))
    del graphs
    gc.collect()
    assert cuda.fatal == []


def test_a_program_that_fails_before_its_capture_raises_its_own_error() -> None:
    cuda = FakeTorchCuda()
    stream = cuda.current_stream()
    with pytest.raises(ValueError, match="made up"):
        CudaGraphs(CPU, cuda).capture(raise_value_error)
    assert cuda.current_stream() is stream
    assert cuda.num_captures == 0


class Waiting:
    """An object in a cycle, found only by the garbage collector; its finalizer waits for the
    device.
    """

    def __init__(self, cuda: FakeTorchCuda) -> None:
        self._cuda, self._self = cuda, self

    def __del__(self) -> None:
        with contextlib.suppress(RuntimeError):
            self._cuda.synchronize()


@pytest.mark.parametrize("is_enabled", [True, False])
def test_no_garbage_is_collected_while_a_program_is_captured(is_enabled: bool) -> None:
    """A finalizer that waits for the device or frees memory of it invalidates the capture."""
    cuda = FakeTorchCuda()
    graphs = CudaGraphs(CPU, cuda)

    def littering() -> list[Any]:
        Waiting(cuda)
        return [[i] for i in range(100)]  # enough for a collection at a threshold of 1

    threshold, was_enabled = gc.get_threshold(), gc.isenabled()
    gc.set_threshold(1)
    (gc.enable if is_enabled else gc.disable)()
    try:
        captured = graphs.capture(littering)
        assert gc.isenabled() == is_enabled
        with pytest.raises(CaptureError):
            graphs.capture(failing_in_capture(cuda, raise_value_error))
        assert gc.isenabled() == is_enabled
    finally:
        gc.set_threshold(*threshold)
        (gc.enable if was_enabled else gc.disable)()
    assert len(captured[1]) == 100


@given(
    steps=st.lists(
        st.sampled_from(
            ["capture", "fail", "invalidate", "drop one", "drop all", "forget", "replay"]
        )
    ),
)
def test_no_history_of_captures_breaks_torchs_rules(steps: list[str]) -> None:
    cuda = FakeTorchCuda()
    graphs = CudaGraphs(CPU, cuda)
    captured: list[Any] = []
    for step in steps:
        if step == "capture":
            captured.append(graphs.capture(program_on(cuda)))
        elif step in ("fail", "invalidate"):
            fail: Callable[[], object] = raise_value_error
            if step == "invalidate":
                fail = cuda.synchronize
            with contextlib.suppress(CaptureError):
                graphs.capture(failing_in_capture(cuda, fail))
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
    assert cuda.underway == {}
    # One pool of each invalidated capture is kept.
    assert len(cuda.pools) == 1 + steps.count("invalidate")


def replay_all(captured: list[Any]) -> None:
    for replay, _ in captured:
        replay()
