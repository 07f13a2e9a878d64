"""UnifiedMemory against a fake runtime: the order of calls, errors, and nothing left behind.

The contract suites run it on a GPU.
"""

from __future__ import annotations

import pytest
import torch

from rollout.backends.cuda.runtime import CudaRuntime
from rollout.backends.cuda.unified import UnifiedMemory
from rollout.errors import ConfigError
from tests.backends.fake_cuda import FakeRuntime
from tests.backends.fake_driver import OUT_OF_MEMORY

DEVICE, HOST_PLACE = (1, 0), (2, 0)  # cudaMemLocation of device 0, and of the host


def test_a_unified_buffer_moves_and_keeps_its_address(runtime: FakeRuntime) -> None:
    memory = UnifiedMemory(runtime)
    address = memory.allocate("a", 100).data_ptr()
    runtime.library.calls.clear()
    assert memory.release("a") == 100
    assert memory.restore("a").data_ptr() == address
    out, back = [
        [
            ("synchronize",),
            ("cudaMemAdvise", address, 100, 3, place),
            ("cudaMemPrefetchAsync", address, 100, place, 0, None),
            ("synchronize",),
        ]
        for place in (HOST_PLACE, (1, 0))
    ]
    assert runtime.library.calls == out + back


def test_a_unified_buffer_larger_than_the_free_memory_is_refused(runtime: FakeRuntime) -> None:
    runtime.free = 99
    with pytest.raises(ConfigError, match=r"100 bytes.*'a'.*99 bytes free.*buffer_size_gb"):
        UnifiedMemory(runtime).allocate("a", 100)
    assert "cudaMallocManaged" not in runtime.library.names()


def test_torchs_cache_is_emptied_before_a_buffer_is_refused(runtime: FakeRuntime) -> None:
    runtime.free, runtime.in_cache = 60, 50
    assert UnifiedMemory(runtime).allocate("a", 100).numel() == 100


def test_unified_restore_refuses_a_buffer_that_does_not_fit(runtime: FakeRuntime) -> None:
    memory = UnifiedMemory(runtime)
    memory.allocate("a", 100)
    memory.release("a")
    runtime.free = 99
    with pytest.raises(ConfigError, match="99 bytes free"):
        memory.restore("a")
    runtime.free = 100
    runtime.library.calls.clear()
    assert memory.restore("a").numel() == 100
    assert runtime.library.calls[1][-1] == DEVICE


def test_resident_unified_memory_is_not_moved_by_restore(runtime: FakeRuntime) -> None:
    memory = UnifiedMemory(runtime)
    memory.allocate("a", 100)
    memory.release("a")
    memory.restore("a")
    runtime.free = 0
    runtime.library.calls.clear()
    memory.restore("a")
    assert runtime.library.calls == []


@pytest.mark.parametrize("function", ["cudaMallocManaged", "cudaMemAdvise", "cudaMemPrefetchAsync"])
def test_a_unified_allocation_that_fails_midway_leaves_nothing(
    runtime: FakeRuntime, function: str
) -> None:
    memory = UnifiedMemory(runtime)
    runtime.library.fails[function] = 700
    with pytest.raises(RuntimeError, match=function):
        memory.allocate("a", 100)
    assert runtime.library.num_managed == 0
    runtime.library.fails.clear()
    assert memory.allocate("a", 100).numel() == 100


def test_unified_memory_that_the_system_refuses_is_a_config_error(runtime: FakeRuntime) -> None:
    runtime.library.fails["cudaMallocManaged"] = OUT_OF_MEMORY
    with pytest.raises(ConfigError, match=r"100 bytes.*'a'.*cudaMallocManaged.*buffer_size_gb"):
        UnifiedMemory(runtime).allocate("a", 100)


@pytest.mark.parametrize("function", ["cudaMemAdvise", "cudaMemPrefetchAsync"])
def test_a_unified_release_that_fails_midway_is_undone_by_restore(
    runtime: FakeRuntime, function: str
) -> None:
    memory = UnifiedMemory(runtime)
    memory.allocate("a", 100)
    runtime.library.fails[function] = 700
    with pytest.raises(RuntimeError, match=function):
        memory.release("a")
    runtime.library.fails.clear()
    runtime.library.calls.clear()
    memory.restore("a")
    moved = [call for call in runtime.library.calls if call[0].startswith("cudaMem")]
    assert [(call[0], DEVICE in call) for call in moved] == [
        ("cudaMemAdvise", True),
        ("cudaMemPrefetchAsync", True),
    ]


@pytest.mark.gpu
def test_unified_contents_survive_release() -> None:
    memory = UnifiedMemory(CudaRuntime(torch.device("cuda")))
    memory.allocate("a", 8 << 20).fill_(5)
    memory.release("a")
    assert bool((memory.restore("a") == 5).all())
