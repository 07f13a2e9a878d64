"""CudaGraphs: captures a program in a CUDA graph, and replays it.

Created by `rollout.backends.cuda.backend`. GraphExecutor uses it through the protocol `GraphDevice`
of `rollout.backends.cuda.graph`. Owns the stream and the memory pool of all captures.
"""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

import torch
from torch import Tensor

from rollout.backends.cuda.graph import CaptureError
from rollout.backends.executors.transfer import download
from rollout.backends.step_tensors import Fetch
from rollout.step.output import StepOutput

Result = TypeVar("Result")


class CudaGraphs:
    """`GraphDevice` by CUDA graphs. All graphs share one memory pool, because they never run at
    once."""

    def __init__(self, device: torch.device, cuda: Any = torch.cuda) -> None:
        """`cuda` is the module torch.cuda, or a fake in tests."""
        self._device, self._cuda = device, cuda
        self._stream: Any = None
        self._pool: Any = None  # held between captures, because no graph can use a freed pool
        self._kept_pools: list[Any] = []  # pools of failed captures

    @property
    def num_bytes(self) -> int:
        """Bytes of device memory in the pools, in use or cached."""
        pools = [*self._kept_pools, *([] if self._pool is None else [self._pool])]
        return sum(segment["total_size"] for pool in pools for segment in pool.snapshot())

    def pinned(self, num_bytes: int) -> Tensor:
        """Return page-locked host memory, flat uint8, zero-filled."""
        return torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=True)

    def capture(self, program: Callable[[], Result]) -> tuple[Callable[[], None], Result]:
        """Capture the program. Return a function that replays it, and the program's result, whose
        tensors each replay writes.

        The program first runs once without capture, to compile kernels and open handles. An error
        of that run is raised as it is. Raises CaptureError if the capture fails.
        """
        cuda = self._cuda
        with cuda.device(self._device):
            stream, pool = self._place()
            current = cuda.current_stream(self._device)
            stream.wait_stream(current)
            # Run on the capture's stream: cuBLAS allocates a permanent workspace per stream. If it
            # came from the pool, it would keep the pool alive.
            with cuda.stream(stream):
                program()
            current.wait_stream(stream)
            cuda.synchronize(self._device)
            graph = cuda.CUDAGraph()
            result = self._record(program, graph, pool, stream)
        return _Replay(graph, pool), result

    def _record(self, program: Callable[[], Result], graph: Any, pool: Any, stream: Any) -> Result:
        """Capture the program in `graph`, and return its result. Raises the first error."""
        cuda = self._cuda
        # A failed capture raises twice: the cause in the program, and again at the end of capture.
        errors: list[BaseException] = []
        try:
            # Torch leaves the capture's stream current if it cannot end a capture. "thread_local":
            # another thread may stage weights during a capture.
            with (
                _paused_collection(),
                cuda.stream(stream),
                cuda.graph(graph, pool=pool.id, stream=stream, capture_error_mode="thread_local"),
            ):
                try:
                    result = program()
                except BaseException as error:
                    errors.append(error)
        except BaseException as error:
            errors.append(error)
            self._keep(graph, pool)
        if errors:
            raise _capture_error(errors)
        return result

    def _keep(self, graph: Any, pool: Any) -> None:
        """Keep graph and pool of a failed capture for the life of the process."""
        # Tell torch that the capture has ended; otherwise it would return no memory from now on.
        # `suppress`: the capture may not have begun.
        with suppress(RuntimeError):
            self._cuda.memory._cuda_endAllocateToPool(self._device.index, pool.id)
        # Torch counts the capture as a user of the pool forever, and aborts the process if a pool
        # in use is freed. The allocator of page-locked memory still reads the graph.
        for part in (graph, pool):
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(part))
        self._kept_pools.append(pool)
        self._pool = None

    def forget(self) -> None:
        """Release the pool, after the caller has dropped all graphs. The next capture makes a new
        pool. Pools of failed captures are kept."""
        self._pool = None

    def download(self, result: StepOutput[Tensor]) -> Fetch:
        """Start the copy of the result to the host. The returned function waits for the result."""
        return download(result, self._device)

    def _place(self) -> tuple[Any, Any]:
        """Return the stream of all warm-up runs and captures, and the pool of captures."""
        if self._stream is None:
            self._stream = self._cuda.Stream(self._device)
        if self._pool is None:
            self._pool = self._cuda.MemPool()
        return self._stream, self._pool


class _Replay:
    """A function that replays the graph."""

    def __init__(self, graph: Any, pool: Any) -> None:
        # Torch aborts the process if the pool is freed before the graph.
        self._graph, self._pool = graph, pool

    def __call__(self) -> None:
        self._graph.replay()

    def __del__(self) -> None:
        self._graph.reset()


@contextmanager
def _paused_collection() -> Iterator[None]:
    """Disable garbage collection, for all threads, within the context."""
    # A finalizer that waits for the device, or frees device memory in the capturing thread, would
    # invalidate the capture.
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _capture_error(errors: list[BaseException]) -> BaseException:
    """Return the error to raise for the first of `errors`: a CaptureError, or the error itself if
    it is not an Exception. Empties the list."""
    first = errors[0]
    errors.clear()  # the list would keep the errors' frames alive
    if not isinstance(first, Exception):
        return first
    error = CaptureError(f"a step cannot be captured: {first}")
    error.__cause__ = first
    return error
