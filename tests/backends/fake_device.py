"""A fake CUDA device for whole engines: memory, streams, graphs and pools obey CUDA's rules.

Steps are computed on the host. Whatever asks for "cuda" by a config gets this device, through the
same choices of memory kind and shapes as a real one.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch

from rollout import InferenceConfig
from rollout.backends import select
from rollout.backends.base import Backend
from rollout.backends.buffers import MemoryBackend
from rollout.backends.cpu.backend import cpu_backend
from rollout.backends.cuda.device_memory import CudaDeviceMemory
from rollout.backends.cuda.graph import GraphExecutor
from rollout.backends.cuda.graph_shapes import make_graph_shapes
from rollout.backends.cuda.memory_saver import MemorySaverMemory
from rollout.backends.cuda.pinned_host import PinnedHostArena
from rollout.backends.cuda.unified import UnifiedMemory
from rollout.backends.cuda.vmm import VirtualMemory
from rollout.backends.devices import parse_device
from rollout.parallel.collectives import Collectives
from tests.backends.fake_cuda import FakeRuntime, FakeSaver
from tests.backends.repeating_device import CPU, HostlessAttention, RepeatingDevice

MEMORY_KINDS: dict[str, Callable[[FakeRuntime], MemoryBackend]] = {
    "device": CudaDeviceMemory,
    "vmm": VirtualMemory,
    "torch_memory_saver": MemorySaverMemory,
    select.UNIFIED: UnifiedMemory,
}


class FakeDevice:
    """Makes the engines' backends. `runtime` counts memory; `graphs` has one entry per engine."""

    def __init__(self) -> None:
        self.runtime = FakeRuntime()
        self.graphs: list[RepeatingDevice] = []

    @property
    def num_replays(self) -> int:
        return sum(graphs.num_replays for graphs in self.graphs)

    @property
    def fatal(self) -> list[str]:
        """Errors that would have ended the process on a real device."""
        return [fatal for graphs in self.graphs for fatal in graphs.cuda.fatal]

    def cuda_backend(
        self,
        memory_kind: str,
        *,
        index: int | None,
        num_graphs: int | None,
        max_mixed_graphs: int,
        max_rows: int,
        collectives: Collectives,
    ) -> Backend:
        """Stands for `rollout.backends.cuda.backend.cuda_backend`."""
        del index
        self.graphs.append(RepeatingDevice())
        graph_shapes = make_graph_shapes(num_graphs, max_rows, max_mixed_graphs)
        return replace(
            cpu_backend("device", collectives=collectives),
            attention=HostlessAttention(),
            memory=MEMORY_KINDS[memory_kind](self.runtime),
            executor=GraphExecutor(CPU, self.graphs[-1], graph_shapes, collectives),
            create_host_arena=lambda: PinnedHostArena(self.runtime),
            fuse_decoder=None,
        )


@contextmanager
def fake_device() -> Iterator[FakeDevice]:
    """Give engines with `device="cuda"` a fake device while entered."""
    device = FakeDevice()

    def backend_of(config: InferenceConfig, *given: Any) -> Backend:
        with pytest.MonkeyPatch.context() as inner:
            inner.setitem(sys.modules, "rollout.backends.cuda.backend", device)
            return real(config, *given)

    real = select._cuda_backend
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "torch_memory_saver", FakeSaver().as_module())
        patch.setattr(select, "require_device", parse_device)
        patch.setattr(select, "_cuda_backend", backend_of)
        patch.setattr(torch.cuda, "mem_get_info", lambda *_: (device.runtime.free, 1 << 40))
        patch.setattr(torch.cuda, "empty_cache", device.runtime.empty_cache)
        yield device
