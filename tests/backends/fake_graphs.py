"""torch.cuda's streams, graphs and pools of memory, without a device: their rules alone.

A private pool has a use count: of the MemPool that made it and of the graphs captured into it. With
none left it lives on as long as memory of it is in use, and no capture may join it any more.
Source: create_or_incref_pool of torch's CUDACachingAllocator, ~MemPool and CUDAGraph::reset.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
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
        self.fatal: list[str] = []
        self.num_captures = 0

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

    # ---- torch.cuda

    def device(self, _device: Any) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def current_stream(self, _device: Any = None) -> FakeStream:
        return self._stream

    def synchronize(self, _device: Any = None) -> None:
        assert self._capturing is None, "the capture is invalidated"

    def empty_cache(self) -> None:
        for key, pool in list(self.pools.items()):
            if key == GENERAL or not pool.use_count:
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
        key = pool or (0, next(self._ids))
        self._use(key)
        graph.key, self._capturing = key, key
        self.num_captures += 1
        try:
            with self.stream(stream or self._default_of_captures):
                yield
        finally:
            self._capturing = None

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
        self.key: tuple[int, int] | None = None

    def pool(self) -> Any:
        return self.key

    def replay(self) -> None:
        assert self.key is not None, "nothing is captured"

    def reset(self) -> None:
        if self.key is not None:
            self._cuda.pools[self.key].use_count -= 1
            self.key = None

    def __del__(self) -> None:
        self.reset()


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
        pool.use_count -= 1
        pool.num_cached_bytes = 0
        self._cuda.empty_cache()
