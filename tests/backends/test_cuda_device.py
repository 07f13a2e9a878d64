"""CudaDeviceMemory without a GPU: the bytes that it reports, and its errors.

The contract suites run it on a GPU.
"""

from __future__ import annotations

import pytest
import torch

from rollout.backends.cuda.device_memory import CudaDeviceMemory
from rollout.errors import ConfigError
from tests.backends.fake_cuda import FakeRuntime


@pytest.mark.parametrize(("before", "after", "reported"), [(900, 0, 700), (900, 900, 0)])
def test_a_dropped_device_buffer_reports_what_the_device_has_back(
    runtime: FakeRuntime, before: int, after: int, reported: int
) -> None:
    runtime.allocated = iter((before, after))
    memory = CudaDeviceMemory(runtime)
    memory.allocate("a", 700)
    assert memory.release("a") == reported
    assert memory.release("a") == 0
    assert runtime.library.names() == []
    memory.trim()
    assert runtime.library.names() == ["empty_cache"]


def test_a_full_device_is_a_config_error_with_both_figures(
    runtime: FakeRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = CudaDeviceMemory(runtime)
    runtime.free, runtime.allocated = 55, iter((0, 0))
    memory.allocate("kv_cache", 700)
    memory.release("kv_cache")
    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", refuse)
        for call in (lambda: memory.restore("kv_cache"), lambda: memory.allocate("b", 700)):
            with pytest.raises(ConfigError, match=r"700 bytes.*55 bytes free.*buffer_size_gb"):
                call()
    assert memory.restore("kv_cache").numel() == 700
    assert memory.allocate("b", 700).numel() == 700


def refuse(*_: object, **__: object) -> None:
    raise torch.cuda.OutOfMemoryError
