"""PinnedHostArena: one reusable, page-locked host buffer that grows by chunks.

Created by `rollout.backends.cuda.backend`. `rollout.worker.kv_cache` and `rollout.weights.memory`
offload to it, through `HostArena`.
"""

from __future__ import annotations

import weakref

from torch import Tensor

from rollout.backends.cpu.mapping import map_bytes
from rollout.backends.cuda.runtime import CudaRuntime
from rollout.errors import ConfigError

_CHUNK_BYTES = 64 << 20  # locking a page costs more than copying it


class PinnedHostArena:
    """`HostArena` with a page-locked anonymous mapping. The arena grows by at least a quarter, to
    whole chunks, with a new mapping. Views outlive `release` as pageable memory. Locked pages
    cannot be freed one by one."""

    def __init__(self, runtime: CudaRuntime, chunk_bytes: int = _CHUNK_BYTES) -> None:
        self._runtime, self._chunk_bytes = runtime, chunk_bytes
        self._locked_N: Tensor | None = None
        self._num_asked = 0  # bytes that the latest `reserve` asked for
        self._unlock: weakref.finalize[..., PinnedHostArena] | None = None

    def reserve(self, num_bytes: int) -> Tensor:
        """Return a flat uint8 view of the first `num_bytes`. Growing the arena loses its contents.
        Raises ConfigError if memory is short or cannot be page-locked. The arena is then empty."""
        if self._locked_N is None or num_bytes > self._locked_N.numel():
            wanted = max(num_bytes, self.num_bytes * 5 // 4)
            self.release()  # first, so that the two mappings never exist together
            self._locked_N = self._locked(-(-wanted // self._chunk_bytes) * self._chunk_bytes)
        self._num_asked = num_bytes
        return self._locked_N[:num_bytes]

    @property
    def num_bytes(self) -> int:
        """Number of bytes that the arena holds now, all page-locked."""
        return 0 if self._locked_N is None else self._locked_N.numel()

    def discard(self, start: int, end: int) -> int:
        """Free the whole arena if [start, end) covers all bytes of the latest `reserve`. Return the
        number of bytes freed."""
        return self.release() if start <= 0 and end >= self._num_asked else 0

    def release(self) -> int:
        """Wait for copies from and to the arena, and free it. Return the number of bytes freed."""
        num_bytes = self.num_bytes
        if self._unlock is not None:
            self._unlock()
        self._locked_N, self._unlock, self._num_asked = None, None, 0
        return num_bytes

    def _locked(self, num_bytes: int) -> Tensor:
        """Return new page-locked memory. Raises ConfigError if it cannot be locked."""
        memory_N = map_bytes("host arena", num_bytes).tensor
        # One lock for the whole mapping: CUDA refuses a copy that spans two locked ranges.
        if num_bytes:
            try:
                self._runtime.pin(memory_N)
            except (MemoryError, RuntimeError) as error:
                raise ConfigError(
                    f"cannot page-lock {num_bytes} bytes of host memory for the host arena "
                    f"({error}); free host memory, or lower buffer_size_gb"
                ) from error
            # The finalizer holds the memory, which must be unlocked before it is unmapped.
            self._unlock = weakref.finalize(self, self._runtime.unpin, memory_N)
            self._unlock.atexit = False
        return memory_N
