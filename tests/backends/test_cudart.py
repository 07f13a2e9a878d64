"""The binding of the CUDA runtime library, against a library that only records.

The contract suites run it on a GPU.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from rollout.backends.cuda.cudart import HOST, Cudart
from rollout.backends.cuda.runtime import CudaRuntime, OwnedBytes
from rollout.errors import ConfigError
from tests.backends.fake_cuda import FakeCudart, FakeRuntime
from tests.backends.fake_driver import OUT_OF_MEMORY


def test_cuda_13_takes_locations_by_value() -> None:
    library = FakeCudart(13000)
    cudart = Cudart(library)
    cudart.prefer(4096, 10, 3)
    cudart.prefetch(4096, 10, HOST)
    assert library.calls == [
        ("cudaMemAdvise", 4096, 10, 3, (1, 3)),
        ("cudaMemPrefetchAsync", 4096, 10, (2, 0), 0, None),
    ]


def test_cuda_12_takes_device_numbers() -> None:
    library = FakeCudart(12080)
    cudart = Cudart(library)
    cudart.prefer(4096, 10, 3)
    cudart.prefetch(4096, 10, HOST)
    assert library.calls == [
        ("cudaMemAdvise", 4096, 10, 3, 3),
        ("cudaMemPrefetchAsync", 4096, 10, -1, None),
    ]


@pytest.mark.parametrize(("code", "error"), [(OUT_OF_MEMORY, MemoryError), (700, RuntimeError)])
def test_cudart_error_names_the_function_and_is_cleared(code: int, error: type[Exception]) -> None:
    library = FakeCudart()
    library.fails["cudaHostRegister"] = code
    with pytest.raises(error, match=rf"cudaHostRegister failed: made up \(error {code}\)"):
        Cudart(library).host_register(4096, 10)
    assert library.names() == ["cudaHostRegister", "cudaGetLastError"]


def test_managed_memory_is_freed_with_the_last_view(runtime: FakeRuntime) -> None:
    tensor = runtime.managed_tensor(100)
    view = tensor[10:]
    del tensor
    assert runtime.library.num_managed == 1
    view.fill_(3)
    del view
    assert runtime.library.num_managed == 0


def test_managed_memory_that_torch_does_not_take_is_freed() -> None:
    runtime = Refusing()
    with pytest.raises(RuntimeError, match="made up") as caught:
        runtime.managed_tensor(100)
    assert runtime.library.num_managed == 0, f"{caught} may be kept for long"


class Refusing(FakeRuntime):
    def _as_tensor(self, owned: OwnedBytes) -> Tensor:
        raise RuntimeError("made up")


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a CUDA device")
def test_a_machine_without_cuda_is_refused() -> None:
    with pytest.raises(ConfigError, match="device='cuda:1': torch sees no CUDA device"):
        CudaRuntime(torch.device("cuda:1"))


def test_exported_tensor_is_shared_with_processes_that_open_it(runtime: FakeRuntime) -> None:
    exported_N, handle = runtime.exported_tensor(100)
    assert len(handle) == 64
    opened_N = runtime.opened_tensor(handle, 100)
    exported_N.fill_(7)
    assert opened_N.tolist() == [7] * 100
    del opened_N
    assert runtime.library.names()[-1] == "cudaIpcCloseMemHandle"
    assert runtime.library.num_managed == 1
    del exported_N
    assert runtime.library.num_managed == 0
    with pytest.raises(RuntimeError, match="cudaIpcOpenMemHandle failed"):
        runtime.opened_tensor(handle, 100)


def test_memory_that_cannot_be_exported_is_freed(runtime: FakeRuntime) -> None:
    runtime.library.fails["cudaIpcGetMemHandle"] = 1
    with pytest.raises(RuntimeError, match="cudaIpcGetMemHandle failed"):
        runtime.exported_tensor(100)
    assert runtime.library.num_managed == 0
    runtime.library.fails["cudaMalloc"] = OUT_OF_MEMORY
    with pytest.raises(MemoryError):
        runtime.exported_tensor(100)


def test_memory_that_torch_cannot_take_is_closed() -> None:
    runtime = FakeRuntime()
    _, handle = kept = runtime.exported_tensor(100)
    refusing = Refusing(library=runtime.library)
    with pytest.raises(RuntimeError, match="made up"):
        refusing.opened_tensor(handle, 100)
    assert runtime.library.names()[-1] == "cudaIpcCloseMemHandle"
    del kept
