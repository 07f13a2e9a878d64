"""torch.cuda's streams, graphs and pools of memory, without a device: their rules alone.

A private pool has a use count: of the MemPool that made it and of the graphs captured into it. With
none left it lives on as long as memory of it is in use, and no capture may join it any more.

A call that a capturing stream does not allow invalidates the capture, and then ending the capture
raises. Both allocators, of the device and of page-locked memory, go on as if that capture were
under way: the graph counts as a user of the pool forever, no cached memory is freed, the filter
that they call at every allocation reads the graph, and no capture may join the pool.
Source: create_or_incref_pool, release_cached_blocks and synchronize_and_free_events of torch's
CUDACachingAllocator, CachingHostAllocatorImpl, ~MemPool, CUDAGraph::capture_end and ::reset.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

GENERAL = (0, 0)
WORKSPACE_BYTES = 32 << 20


class _PrivatePool:
    def __init__(self) -> None:
        self.use_count = 1
        self.num_live_bytes = 0
        self.num_cached_bytes = 0


class FakeStream:
    def __init__(self, _device: Any = None) -> None:
        pass

    def wait_stream(self, stream: FakeStream) -> None:
        assert isinstance(stream, FakeStream)


class FakeTorchCuda:
    """Stands for the module torch.cuda. `fatal`: what would have ended the process."""

    def __init__(self) -> None:
        self._ids = itertools.count(1)
        self.pools: dict[tuple[int, int], _PrivatePool] = {GENERAL: _PrivatePool()}
        self._workspaces: dict[FakeStream, tuple[int, int]] = {}  # of cuBLAS, kept for good
        self._default = FakeStream()
        self._default_of_captures = FakeStream()
        self._stream = self._default
        self._capturing: tuple[int, int] | None = None
        self._is_invalidated = False
        # What the allocators, of the device and of page-locked memory, take for captures that have
        # not ended: their pools, and the id of each one's graph, which a filter reads.
        self.underway: dict[tuple[int, int], int] = {}
        self.underway_on_host: dict[tuple[int, int], int] = {}
        self.fatal: list[str] = []
        self.num_captures = 0
        # torch.cuda.memory
        self.memory = SimpleNamespace(_cuda_endAllocateToPool=self._end_allocate_to_pool)

    # ---- what a program does

    def product(self) -> None:
        """A matrix product by cuBLAS, whose workspace each stream has once."""
        if self._stream not in self._workspaces:
            self._workspaces[self._stream] = self.allocate(WORKSPACE_BYTES)

    def allocate(self, num_bytes: int) -> tuple[int, int]:
        """Take memory for good. Returns the pool that it is of."""
        pool = self._capturing or GENERAL
        self.pools[pool].num_live_bytes += num_bytes
        return pool

    def allocate_for_a_moment(self, num_bytes: int) -> None:
        pool = self.pools[self._capturing or GENERAL]
        pool.num_cached_bytes = max(pool.num_cached_bytes, num_bytes)

    @property
    def is_capturing(self) -> bool:
        return self._capturing is not None

    # ---- torch.cuda

    def device(self, _device: Any) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def current_stream(self, _device: Any = None) -> FakeStream:
        return self._stream

    def synchronize(self, _device: Any = None) -> None:
        """A device cannot be waited for while a stream of it captures."""
        if self._capturing is not None:
            self._is_invalidated = True
            raise RuntimeError("operation not permitted when stream is capturing")

    def empty_cache(self) -> None:
        for key, pool in list(self.pools.items()):
            if not self.underway if key == GENERAL else not pool.use_count:
                pool.num_cached_bytes = 0
            if not pool.use_count and not pool.num_live_bytes:
                del self.pools[key]

    @contextlib.contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        before, self._stream = self._stream, stream
        try:
            yield
        finally:
            self._stream = before

    @contextlib.contextmanager
    def graph(
        self, graph: Any, pool: Any = None, stream: Any = None, capture_error_mode: str = "global"
    ) -> Iterator[None]:
        del capture_error_mode
        self.synchronize()
        self.empty_cache()
        before, self._stream = self._stream, stream or self._default_of_captures
        graph.capture_begin(pool or (0, next(self._ids)))
        try:
            yield
        finally:
            graph.capture_end()
            self._stream = before  # as torch has it: not where the line above raises

    def begin_capture(self, key: tuple[int, int], graph: int) -> None:
        """Begin a capture as cudaStreamBeginCapture does, and notify both allocators."""
        self._use(key)
        for underway in (self.underway, self.underway_on_host):
            if key in underway:
                raise RuntimeError("beginAllocateToPool: already recording to mempool_id")
            underway[key] = graph
        self._capturing, self._is_invalidated = key, False
        self.num_captures += 1

    def end_capture(self, key: tuple[int, int]) -> None:
        """End a capture as cudaStreamEndCapture does, and notify both allocators."""
        self._capturing = None
        if self._is_invalidated:
            raise RuntimeError("operation failed due to a previous error during capture")
        del self.underway[key], self.underway_on_host[key]

    def _end_allocate_to_pool(self, _device: int, key: tuple[int, int]) -> None:
        if key not in self.underway:
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
        del self.underway[key]

    def _use(self, key: tuple[int, int]) -> None:
        if key not in self.pools:
            self.pools[key] = _PrivatePool()
            return
        if not self.pools[key].use_count:
            raise RuntimeError("it->second->use_count > 0 INTERNAL ASSERT FAILED")
        self.pools[key].use_count += 1

    @property
    def Stream(self) -> Any:
        return FakeStream

    def CUDAGraph(self) -> FakeGraph:
        return FakeGraph(self)

    def MemPool(self) -> FakeMemPool:
        return FakeMemPool(self, (next(self._ids), 0))


class FakeGraph:
    def __init__(self, cuda: FakeTorchCuda) -> None:
        self._cuda = cuda
        self._key: tuple[int, int] | None = None
        self._has_ended = False

    def capture_begin(self, pool: tuple[int, int]) -> None:
        self._key = pool
        self._cuda.begin_capture(pool, id(self))

    def capture_end(self) -> None:
        assert self._key is not None, "nothing is captured"
        self._cuda.end_capture(self._key)
        self._has_ended = True

    def replay(self) -> None:
        assert self._has_ended, "replay without a preceding successful capture"

    def reset(self) -> None:
        if self._has_ended and self._key is not None:
            self._cuda.pools[self._key].use_count -= 1
        self._has_ended = False

    def __del__(self) -> None:
        self.reset()
        if id(self) in self._cuda.underway_on_host.values():
            self._cuda.fatal.append("an allocator reads a graph that is gone")


class FakeMemPool:
    def __init__(self, cuda: FakeTorchCuda, key: tuple[int, int]) -> None:
        self._cuda, self.id = cuda, key
        cuda._use(key)

    def snapshot(self) -> list[dict[str, int]]:
        pool = self._cuda.pools[self.id]
        return [{"total_size": pool.num_live_bytes}, {"total_size": pool.num_cached_bytes}]

    def __del__(self) -> None:
        pool = self._cuda.pools[self.id]
        if pool.use_count != 1:
            self._cuda.fatal.append(f"a MemPool was destroyed at use count {pool.use_count}")
        if self._cuda.underway:
            self._cuda.fatal.append("a MemPool was destroyed while a capture was under way")
        pool.use_count -= 1
        pool.num_cached_bytes = 0
        self._cuda.empty_cache()
