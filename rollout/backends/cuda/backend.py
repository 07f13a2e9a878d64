"""cuda_backend: puts the parts of the CUDA backend together.

Called by `rollout.backends.select`, which imports this module only for a CUDA device, because the
module imports Triton.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from rollout.backends.base import Backend, BackendExecutor
from rollout.backends.buffers import MemoryBackend
from rollout.backends.cuda.attention import TritonPagedAttention
from rollout.backends.cuda.copy import copy_tokens
from rollout.backends.cuda.cuda_graph import CudaGraphs
from rollout.backends.cuda.device_memory import CudaDeviceMemory
from rollout.backends.cuda.graph import GraphExecutor
from rollout.backends.cuda.graph_shapes import make_graph_shapes
from rollout.backends.cuda.memory_saver import MemorySaverMemory
from rollout.backends.cuda.ops import TritonOps
from rollout.backends.cuda.pinned_host import PinnedHostArena
from rollout.backends.cuda.runtime import CudaRuntime
from rollout.backends.cuda.unified import UnifiedMemory
from rollout.backends.cuda.vmm import VirtualMemory
from rollout.backends.executors.eager import EagerExecutor
from rollout.parallel.collectives import ONE_RANK, Collectives

_MEMORY: dict[str, Callable[[CudaRuntime], MemoryBackend]] = {
    "device": CudaDeviceMemory,
    "vmm": VirtualMemory,
    "torch_memory_saver": MemorySaverMemory,
    "unified": UnifiedMemory,
}


def cuda_backend(
    memory_kind: str,
    *,
    index: int | None = None,
    num_graphs: int | None,
    max_mixed_graphs: int,
    max_rows: int,
    collectives: Collectives = ONE_RANK,
) -> Backend:
    """Return a Backend on the CUDA device `index`; None means the current device.

    `num_graphs`, `max_rows` and `max_mixed_graphs` choose the shapes of graphs (see
    `make_graph_shapes`). If `num_graphs` is 0, steps run without graphs. Raises ConfigError without
    a CUDA device, and if the device does not support `memory_kind`.
    """
    runtime = CudaRuntime(torch.device("cuda" if index is None else f"cuda:{index}"))
    device = runtime.device
    memory: MemoryBackend = _MEMORY[memory_kind](runtime)
    executor: BackendExecutor = EagerExecutor(device)
    if num_graphs != 0:
        graph_shapes = make_graph_shapes(num_graphs, max_rows, max_mixed_graphs)
        executor = GraphExecutor(device, CudaGraphs(device), graph_shapes, collectives)
    properties = torch.cuda.get_device_properties(device)
    attention = TritonPagedAttention(num_multiprocessors=properties.multi_processor_count)
    return Backend(
        device=device,
        memory_bytes=properties.total_memory,
        ops=TritonOps(),
        attention=attention,
        executor=executor,
        memory=memory,
        copy_tokens=copy_tokens,
        as_current=runtime.as_current,
        create_host_arena=lambda: PinnedHostArena(runtime),
        collectives=collectives,
    )
