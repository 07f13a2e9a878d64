"""CudaGraphs: capture and replay by CUDA."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rollout.backends.executors.transfer import download
from rollout.backends.step_tensors import Fetch
from rollout.step.output import StepOutput


class CudaGraphs:
    """Implements `GraphDevice`. All graphs share one pool of memory: they never run at once."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool: Any = None

    def pinned(self, num_bytes: int) -> Tensor:
        """Page-locked host memory, flat uint8, zero-filled."""
        return torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=True)

    def capture(
        self, program: Callable[[], StepOutput[Tensor]]
    ) -> tuple[Callable[[], None], StepOutput[Tensor]]:
        """(replay, its result). The program runs once before: kernels compile, handles open."""
        side = torch.cuda.Stream(self._device)
        side.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(side):
            program()
        torch.cuda.current_stream(self._device).wait_stream(side)
        torch.cuda.synchronize(self._device)
        graph = torch.cuda.CUDAGraph()
        # Another thread may stage weights meanwhile, which is no concern of this capture.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            result = program()
        self._pool = graph.pool()
        return graph.replay, result

    def download(self, result: StepOutput[Tensor]) -> Fetch:
        """Queue the result's way to the host; the function returned waits for it."""
        return download(result, self._device)
