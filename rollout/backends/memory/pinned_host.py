"""PinnedHostArena: one reusable, page-locked host buffer."""

from __future__ import annotations

import weakref

from torch import Tensor

from rollout.backends.memory.cuda_runtime import CudaRuntime
from rollout.backends.memory.mapping import map_bytes
from rollout.errors import ConfigError


class PinnedHostArena:
    """Implements `HostArena` with an anonymous mapping that a device copies from and to by itself.

    Views outlive `release` as pageable memory. Page-locked pages cannot be given back one by one.
    """

    def __init__(self, runtime: CudaRuntime) -> None:
        self._runtime = runtime
        self._tensor: Tensor | None = None
        self._unpin: weakref.finalize[..., PinnedHostArena] | None = None

    def reserve(self, num_bytes: int) -> Tensor:
        """A flat uint8 view of exactly `num_bytes`; earlier contents are lost if it has to grow.

        Raises ConfigError if the memory is not to be had, or not to be page-locked.
        """
        if num_bytes > self.num_bytes or self._tensor is None:
            self.release()  # before the new mapping is made: the two never exist together
            self._tensor = self._pinned(num_bytes)
        return self._tensor[:num_bytes]

    @property
    def num_bytes(self) -> int:
        """Bytes the arena can hold without growing."""
        return 0 if self._tensor is None else self._tensor.numel()

    def discard(self, start: int, end: int) -> int:
        """Free the arena if [start, end) is all of it, else nothing. Returns bytes freed."""
        return self.release() if start <= 0 and end >= self.num_bytes else 0

    def release(self) -> int:
        """Free the arena, after waiting for copies from and to it. Returns bytes freed."""
        num_bytes = self.num_bytes
        if self._unpin is not None:
            self._unpin()
        self._tensor = self._unpin = None
        return num_bytes

    def _pinned(self, num_bytes: int) -> Tensor:
        tensor = map_bytes("host arena", num_bytes).tensor
        if num_bytes == 0:
            return tensor
        try:
            self._runtime.pin(tensor)
        except (MemoryError, RuntimeError) as error:
            raise ConfigError(
                f"no {num_bytes} bytes of host memory could be page-locked for the host arena "
                f"({error}); free host memory, or lower buffer_size_gb"
            ) from error
        # Holds the tensor: memory that is unmapped first stays locked, and its addresses with it.
        self._unpin = weakref.finalize(self, self._runtime.unpin, tensor)
        self._unpin.atexit = False
        return tensor
