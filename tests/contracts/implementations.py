"""The implementations that every contract suite runs over; a new one is added only here."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from rollout.backends.attention.native import NativePagedAttention
from rollout.backends.attention.reference import ReferenceAttention
from rollout.backends.attention.torch_sdpa import TorchSdpaAttention
from rollout.backends.base import AttentionBackend, HostArena, MemoryBackend, Ops
from rollout.backends.memory.device import DeviceMemory
from rollout.backends.memory.host_arena import MappedHostArena
from rollout.backends.memory.reserved import ReservedMemory
from rollout.backends.native.kernels import Kernels
from rollout.backends.native.library import load_library
from rollout.backends.ops.cpu import CpuOps
from rollout.backends.ops.native import NativeOps
from rollout.backends.ops.reference import ReferenceOps


def kernels() -> Kernels:
    """The compiled kernels; the test is skipped where there is no compiler."""
    library = load_library()
    if library is None:
        pytest.skip("no native kernels on this machine")
    return Kernels(library)


OPS: dict[str, Callable[[], Ops]] = {
    "reference": ReferenceOps,
    "cpu": CpuOps,
    "native": lambda: NativeOps(kernels()),
}
ATTENTION: dict[str, Callable[[], AttentionBackend]] = {
    "reference": ReferenceAttention,
    "torch_sdpa": TorchSdpaAttention,
    "native": lambda: NativePagedAttention(kernels()),
}
MEMORY: dict[str, Callable[[], MemoryBackend]] = {
    "device": DeviceMemory,
    "reserved": ReservedMemory,
}
HOST_ARENAS: dict[str, Callable[[], HostArena]] = {"mapped": MappedHostArena}
