"""The implementations that every contract suite runs over. Add a new one here."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor

from rollout.backends.base import AttentionBackend, Ops
from rollout.backends.buffers import HostArena, MemoryBackend
from rollout.backends.cpu.attention import NativePagedAttention
from rollout.backends.cpu.kernels import Kernels
from rollout.backends.cpu.library import load_library
from rollout.backends.cpu.linear_ops import CpuOps
from rollout.backends.cpu.memory import DeviceMemory, MappedHostArena, ReservedMemory
from rollout.backends.cpu.ops import NativeOps
from rollout.backends.cpu.torch_sdpa import TorchSdpaAttention
from rollout.backends.cuda.device_memory import CudaDeviceMemory
from rollout.backends.cuda.memory_saver import MemorySaverMemory
from rollout.backends.cuda.pinned_host import PinnedHostArena
from rollout.backends.cuda.runtime import CudaRuntime
from rollout.backends.cuda.unified import UnifiedMemory
from rollout.backends.cuda.vmm import VirtualMemory
from rollout.backends.ops.reference import ReferenceOps
from rollout.errors import ConfigError
from tests.contracts.reference_attention import ReferenceAttention


def kernels() -> Kernels:
    """Return the compiled kernels; skips the test without a compiler."""
    library = load_library()
    if library is None:
        pytest.skip("no native kernels on this machine")
    return Kernels(library)


def cpu_ops() -> Ops:
    """Return CpuOps; skips the test if ROLLOUT_TUNE names a product that needs kernels."""
    try:
        return CpuOps()
    except ConfigError as error:
        pytest.skip(str(error))


def cuda_runtime() -> CudaRuntime:
    """Return the current CUDA device's runtime."""
    return CudaRuntime(torch.device("cuda"))


def marked(names: Iterable[str], *, on_gpu: Collection[str]) -> list[Any]:
    """Return a fixture's parameters: `names`, with those in `on_gpu` marked as needing a GPU."""
    return [pytest.param(n, marks=pytest.mark.gpu) if n in on_gpu else n for n in names]


def triton_ops() -> Ops:
    """Return TritonOps on a GPU, or interpreted; skips the test without Triton."""
    pytest.importorskip("triton")
    from tests.contracts.on_device import device_ops

    return device_ops()


def triton_attention() -> AttentionBackend:
    """Return Triton's attention on a GPU, or interpreted; skips the test without Triton."""
    pytest.importorskip("triton")
    from tests.contracts.attention_on_device import device_attention

    return device_attention()


def is_interpreted(name: str) -> bool:
    """Return whether these operations run in Triton's interpreter, at about 10 ms a program."""
    return name == "triton" and not torch.cuda.is_available()


OPS: dict[str, Callable[[], Ops]] = {
    "reference": ReferenceOps,
    "cpu": cpu_ops,
    "native": lambda: NativeOps(kernels()),
    "triton": triton_ops,
}
ATTENTION: dict[str, Callable[[], AttentionBackend]] = {
    "reference": ReferenceAttention,
    "torch_sdpa": TorchSdpaAttention,
    "native": lambda: NativePagedAttention(kernels()),
    "triton": triton_attention,
}
MEMORY: dict[str, Callable[[], MemoryBackend]] = {
    "device": DeviceMemory,
    "reserved": ReservedMemory,
    "cuda_device": lambda: CudaDeviceMemory(cuda_runtime()),
    "vmm": lambda: VirtualMemory(cuda_runtime()),
    "torch_memory_saver": lambda: MemorySaverMemory(cuda_runtime()),
    "unified": lambda: UnifiedMemory(cuda_runtime()),
}
GPU_MEMORY = ("cuda_device", "vmm", "torch_memory_saver", "unified")
HOST_ARENAS: dict[str, Callable[[], HostArena]] = {
    "mapped": MappedHostArena,
    "pinned": lambda: PinnedHostArena(cuda_runtime()),
}
GPU_HOST_ARENAS = ("pinned",)


def prepared_handle(ops: Ops, weight: Tensor, bias: Tensor | None = None) -> Any:
    """Return a handle of this weight, prepared as an engine does."""
    handle = ops.prepare_linear(weight, bias)
    ops.choose_products([handle])
    return handle
