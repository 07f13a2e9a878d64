"""CudaGraphs: capture and replay by CUDA."""

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
    """Implements `GraphDevice`. All graphs share one pool of memory: they never run at once.

    The pool is held between captures: torch lets no graph join one that nobody uses any more.
    """

    def __init__(self, device: torch.device, cuda: Any = torch.cuda) -> None:
        """`cuda`: the module torch.cuda."""
        self._device, self._cuda = device, cuda
        self._stream: Any = None
        self._pool: Any = None
        self._kept_pools: list[Any] = []  # of captures that were invalidated

    @property
    def num_bytes(self) -> int:
        """Bytes of the device that the pools have, in use or kept for later."""
        pools = [*self._kept_pools, *([] if self._pool is None else [self._pool])]
        return sum(segment["total_size"] for pool in pools for segment in pool.snapshot())

    def pinned(self, num_bytes: int) -> Tensor:
        """Page-locked host memory, flat uint8, zero-filled."""
        return torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=True)

    def capture(self, program: Callable[[], Result]) -> tuple[Callable[[], None], Result]:
        """(replay, its result). The program runs once before: kernels compile, handles open.

        Raises what the program raises in that run, and CaptureError if its capture fails.
        """
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
            result = self._record(program, graph, pool, stream)
        return _Replay(graph, pool), result

    def _record(self, program: Callable[[], Result], graph: Any, pool: Any, stream: Any) -> Result:
        """Capture the program. An invalidated capture fails twice: in the program, with the cause,
        and at its end."""
        cuda = self._cuda
        errors: list[BaseException] = []
        try:
            # Torch leaves its own stream current where it cannot end a capture. Another thread may
            # stage weights meanwhile, which is no concern of a capture in "thread_local" mode.
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
        """Keep what an invalidated capture leaves for the life of the process.

        Torch counts the capture as a use of the pool for good, and ends a process in which a pool
        in use is freed. The allocator of page-locked memory goes on to read the graph.
        """
        # While a capture is under way, torch gives no memory back and frees no pool. `suppress`:
        # torch was never told of its begin.
        with suppress(RuntimeError):
            self._cuda.memory._cuda_endAllocateToPool(self._device.index, pool.id)
        for part in (graph, pool):
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(part))
        self._kept_pools.append(pool)
        self._pool = None

    def forget(self) -> None:
        """All graphs are dropped: give their memory back, but for pools that must be kept. The next
        capture begins a new pool."""
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


@contextmanager
def _paused_collection() -> Iterator[None]:
    """Collect no garbage, in any thread: a finalizer that waits for the device invalidates every
    capture on it, and so does one that frees its memory in the thread that captures."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _capture_error(errors: list[BaseException]) -> BaseException:
    """Return what to raise for the first of these errors, and empty the list: in the frames of the
    errors, it would keep all of them alive."""
    first = errors[0]
    errors.clear()
    if not isinstance(first, Exception):
        return first
    error = CaptureError(f"a step cannot be captured: {first}")
    error.__cause__ = first
    return error
