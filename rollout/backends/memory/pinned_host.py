"""PinnedHostArena: one reusable, page-locked host buffer that grows by chunks."""

from __future__ import annotations

import weakref

from torch import Tensor

from rollout.backends.memory.cuda_runtime import CudaRuntime
from rollout.backends.memory.mapping import map_bytes
from rollout.errors import ConfigError

_CHUNK_BYTES = 64 << 20  # to lock a page costs more than to copy it


class PinnedHostArena:
    """Implements `HostArena` with an anonymous mapping that a device copies from and to by itself.

    Its pages are locked as they are first asked for, whole chunks at a time, and stay so. The
    mapping has room for up to twice as much, which takes no memory: an arena that grows is locked
    anew once in a doubling. Views outlive `release` as pageable memory. Page-locked pages cannot be
    given back one by one.
    """

    def __init__(self, runtime: CudaRuntime, chunk_bytes: int = _CHUNK_BYTES) -> None:
        self._runtime, self._chunk_bytes = runtime, chunk_bytes
        self._tensor: Tensor | None = None
        self._num_asked = 0  # by the latest `reserve`
        self._locked: list[Tensor] = []  # parts of the mapping, one after the other
        self._unpin: weakref.finalize[..., PinnedHostArena] | None = None

    def reserve(self, num_bytes: int) -> Tensor:
        """A flat uint8 view of exactly `num_bytes`; earlier contents may be lost if it has to grow.

        Raises ConfigError if the memory is not to be had, or not to be page-locked.
        """
        if self._tensor is None or num_bytes > self._tensor.numel():
            self.release()  # before the new mapping is made: the two never exist together
            num_chunks = -(-num_bytes // self._chunk_bytes)
            room = self._chunk_bytes << max(0, num_chunks - 1).bit_length() if num_bytes else 0
            self._tensor = map_bytes("host arena", room).tensor
            # Holds the parts: memory that is unmapped first stays locked, and its addresses, too.
            self._unpin = weakref.finalize(self, _unpin_all, self._runtime, self._locked)
            self._unpin.atexit = False
        if num_bytes > self.num_bytes:
            self._lock_until(-(-num_bytes // self._chunk_bytes) * self._chunk_bytes, num_bytes)
        self._num_asked = num_bytes
        return self._tensor[:num_bytes]

    @property
    def num_bytes(self) -> int:
        """Bytes the arena holds now, all page-locked."""
        return sum(part.numel() for part in self._locked)

    def discard(self, start: int, end: int) -> int:
        """Free the arena if [start, end) is all that was asked for, else nothing. Returns bytes
        freed."""
        return self.release() if start <= 0 and end >= self._num_asked else 0

    def release(self) -> int:
        """Free the arena, after waiting for copies from and to it. Returns bytes freed."""
        num_bytes = self.num_bytes
        if self._unpin is not None:
            self._unpin()
        self._tensor, self._locked, self._unpin = None, [], None
        self._num_asked = 0
        return num_bytes

    def _lock_until(self, end: int, num_bytes: int) -> None:
        assert self._tensor is not None
        part = self._tensor[self.num_bytes : end]
        try:
            self._runtime.pin(part)
        except (MemoryError, RuntimeError) as error:
            raise ConfigError(
                f"no {num_bytes} bytes of host memory could be page-locked for the host arena "
                f"({error}); free host memory, or lower buffer_size_gb"
            ) from error
        self._locked.append(part)


def _unpin_all(runtime: CudaRuntime, locked: list[Tensor]) -> None:
    for part in locked:
        runtime.unpin(part)
