"""Properties of every memory kind of a GPU that keeps its addresses.

The contract suites run it on a GPU.
"""

from __future__ import annotations

import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rollout.backends.buffers import MemoryBackend
from rollout.backends.cuda.memory_saver import MemorySaverMemory
from rollout.backends.cuda.runtime import CudaRuntime
from rollout.backends.cuda.unified import UnifiedMemory
from rollout.backends.cuda.vmm import VirtualMemory
from rollout.errors import ConfigError
from tests.backends.fake_cuda import FakeRuntime, FakeSaver

MIB = 1 << 20


@pytest.mark.parametrize("kind", [VirtualMemory, UnifiedMemory, MemorySaverMemory])
def test_a_stable_buffer_is_the_same_after_any_history(
    kind: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch_memory_saver", FakeSaver().as_module())

    @given(steps=st.lists(st.sampled_from(["release", "restore", "crowd", "leave"])))
    def check(steps: list[str]) -> None:
        runtime = FakeRuntime()
        memory: MemoryBackend = kind(runtime)
        buffer = memory.allocate("a", 100)
        for step in steps:
            if step in ("crowd", "leave"):
                runtime.free = 0 if step == "crowd" else 1 << 40
            elif step == "release":
                memory.release("a")
            else:
                try:
                    assert memory.restore("a").data_ptr() == buffer.data_ptr()
                except ConfigError:
                    assert runtime.free == 0
        runtime.free = 1 << 40
        assert memory.restore("a").data_ptr() == buffer.data_ptr()

    check()


@pytest.mark.gpu
@pytest.mark.meters_memory
@pytest.mark.parametrize("kind", [VirtualMemory, UnifiedMemory, MemorySaverMemory])
def test_a_captured_graph_writes_to_a_buffer_that_went_and_came_back(kind: type) -> None:
    memory: MemoryBackend = kind(CudaRuntime(torch.device("cuda")))
    buffer = memory.allocate("a", 64 * MIB)
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    buffer.add_(0)  # loads the kernel
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        buffer.add_(1)
    memory.release("a")
    memory.restore("a").fill_(7)
    graph.replay()
    assert bool((buffer == 8).all())
