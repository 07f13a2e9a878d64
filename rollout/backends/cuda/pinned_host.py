"""PinnedHostArena: one reusable, page-locked host buffer that grows by chunks."""

from __future__ import annotations

import weakref

from torch import Tensor

from rollout.backends.cpu.mapping import map_bytes
from rollout.backends.cuda.runtime import CudaRuntime
from rollout.errors import ConfigError

_CHUNK_BYTES = 64 << 20  # to lock a page costs more than to copy it


class PinnedHostArena:
    """Implements `HostArena` with an anonymous mapping that a device copies from and to by itself.

    All of it is locked by one call: CUDA refuses a copy that reaches from one locked range into the
    next. So an arena that grows moves, by whole chunks and by a quarter at least, to move seldom.
    Views outlive `release` as pageable memory. Page-locked pages cannot be given back one by one.
    """

    def __init__(self, runtime: CudaRuntime, chunk_bytes: int = _CHUNK_BYTES) -> None:
        self._runtime, self._chunk_bytes = runtime, chunk_bytes
        self._locked_N: Tensor | None = None
        self._num_asked = 0  # by the latest `reserve`
        self._unlock: weakref.finalize[..., PinnedHostArena] | None = None

    def reserve(self, num_bytes: int) -> Tensor:
        """A flat uint8 view of exactly `num_bytes`; earlier contents are lost if it has to grow.

        Raises ConfigError if the memory is not to be had, or not to be page-locked; the arena then
        has none.
        """
        if self._locked_N is None or num_bytes > self._locked_N.numel():
            wanted = max(num_bytes, self.num_bytes * 5 // 4)
            self.release()  # before the new mapping is made: the two never exist together
            self._locked_N = self._locked(-(-wanted // self._chunk_bytes) * self._chunk_bytes)
        self._num_asked = num_bytes
        return self._locked_N[:num_bytes]

    @property
    def num_bytes(self) -> int:
        """Bytes the arena holds now, all page-locked."""
        return 0 if self._locked_N is None else self._locked_N.numel()

    def discard(self, start: int, end: int) -> int:
        """Free the arena if [start, end) is all that was asked for, else nothing. Returns bytes
        freed."""
        return self.release() if start <= 0 and end >= self._num_asked else 0

    def release(self) -> int:
        """Free the arena, after waiting for copies from and to it. Returns bytes freed."""
        num_bytes = self.num_bytes
        if self._unlock is not None:
            self._unlock()
        self._locked_N, self._unlock, self._num_asked = None, None, 0
        return num_bytes

    def _locked(self, num_bytes: int) -> Tensor:
        """New memory, all of it locked until it is released."""
        memory_N = map_bytes("host arena", num_bytes).tensor
        if num_bytes:
            try:
                self._runtime.pin(memory_N)
            except (MemoryError, RuntimeError) as error:
                raise ConfigError(
                    f"no {num_bytes} bytes of host memory could be page-locked for the host arena "
                    f"({error}); free host memory, or lower buffer_size_gb"
                ) from error
            # Holds the memory: what is unmapped first stays locked, and its addresses, too.
            self._unlock = weakref.finalize(self, self._runtime.unpin, memory_N)
            self._unlock.atexit = False
        return memory_N
