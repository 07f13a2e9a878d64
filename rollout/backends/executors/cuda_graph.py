"""CudaGraphs: capture and replay by CUDA."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from rollout.backends.executors.transfer import download
from rollout.backends.step_tensors import Fetch
from rollout.step.output import StepOutput

Result = TypeVar("Result")


class CudaGraphs:
    """Implements `GraphDevice`. All graphs share one pool of memory: they never run at once.

    The pool is held between captures: torch lets no graph join one that nobody uses any more.
    """

    def __init__(self, device: torch.device, cuda: Any = torch.cuda) -> None:
        """`cuda`: the module torch.cuda."""
        self._device, self._cuda = device, cuda
        self._stream: Any = None
        self._pool: Any = None

    @property
    def num_bytes(self) -> int:
        """Bytes of the device that the pool has, in use or kept for later."""
        if self._pool is None:
            return 0
        return sum(segment["total_size"] for segment in self._pool.snapshot())

    def pinned(self, num_bytes: int) -> Tensor:
        """Page-locked host memory, flat uint8, zero-filled."""
        return torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=True)

    def capture(self, program: Callable[[], Result]) -> tuple[Callable[[], None], Result]:
        """(replay, its result). The program runs once before: kernels compile, handles open."""
        cuda = self._cuda
        with cuda.device(self._device):
            stream, pool = self._place()
            current = cuda.current_stream(self._device)
            stream.wait_stream(current)
            # On the stream of the capture: what cuBLAS keeps for a stream, for good, is then no
            # memory of the pool, which it would keep alive.
            with cuda.stream(stream):
                program()
            current.wait_stream(stream)
            cuda.synchronize(self._device)
            graph = cuda.CUDAGraph()
            # Another thread may stage weights meanwhile, which is no concern of this capture.
            with cuda.graph(graph, pool=pool.id, stream=stream, capture_error_mode="thread_local"):
                result = program()
        return _Replay(graph, pool), result

    def forget(self) -> None:
        """All graphs are dropped: give their memory back. The next capture begins a new pool."""
        self._pool = None

    def download(self, result: StepOutput[Tensor]) -> Fetch:
        """Queue the result's way to the host; the function returned waits for it."""
        return download(result, self._device)

    def _place(self) -> tuple[Any, Any]:
        """The stream of all warm-ups and captures, and their pool."""
        if self._stream is None:
            self._stream = self._cuda.Stream(self._device)
        if self._pool is None:
            self._pool = self._cuda.MemPool()
        return self._stream, self._pool


class _Replay:
    """Replays a graph, and keeps its pool: torch ends a process where the pool goes first."""

    def __init__(self, graph: Any, pool: Any) -> None:
        self._graph, self._pool = graph, pool

    def __call__(self) -> None:
        self._graph.replay()

    def __del__(self) -> None:
        self._graph.reset()
