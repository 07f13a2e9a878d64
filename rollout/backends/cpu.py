"""The four parts that make the CPU backend."""

from __future__ import annotations

import torch

from rollout.backends.attention.torch_sdpa import TorchSdpaAttention
from rollout.backends.base import Backend, MemoryBackend
from rollout.backends.executors.eager import EagerExecutor
from rollout.backends.memory.device import DeviceMemory
from rollout.backends.memory.host_arena import MappedHostArena
from rollout.backends.memory.reserved import ReservedMemory
from rollout.backends.ops.cpu import CpuOps

MEMORY_KINDS = ("device", "reserved")


def cpu_backend(memory_kind: str) -> Backend:
    """A Backend on CPU; `memory_kind` is one of MEMORY_KINDS."""
    device = torch.device("cpu")
    memory: MemoryBackend = ReservedMemory() if memory_kind == "reserved" else DeviceMemory(device)
    return Backend(
        device=device,
        ops=CpuOps(),
        attention=TorchSdpaAttention(),
        executor=EagerExecutor(),
        memory=memory,
        host_arena=MappedHostArena(),
    )
