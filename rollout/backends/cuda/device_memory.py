"""CudaDeviceMemory: the memory kind "device", buffers of torch's own allocator.

Used by the KV cache and weight memory, which drop a buffer to release it and allocate it again.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rollout.backends.cuda.runtime import CudaMemory, CudaRuntime, too_large


class CudaDeviceMemory(CudaMemory):
    """Implements `MemoryBackend` with torch's own allocator.

    A released buffer's memory returns to the device once the caller has dropped its views as well.
    """

    has_stable_addresses = False

    def __init__(self, runtime: CudaRuntime) -> None:
        super().__init__(runtime)
        self._num_bytes: dict[str, int] = {}

    def allocate(self, name: str, num_bytes: int) -> Tensor:
        """Return a new flat uint8 tensor, zero-filled. Raises ConfigError if memory is short."""
        assert name not in self._num_bytes, f"buffer {name!r} exists"
        self._tensors[name] = self._empty(name, num_bytes).zero_()
        self._num_bytes[name] = num_bytes
        return self._tensors[name]

    def release(self, name: str) -> int:
        """Drop the buffer. Returns its bytes, which the device gets back at `trim`.

        Returns 0 while a view of the buffer exists, and if it was released already.
        """
        if name not in self._tensors:
            return 0
        before = self._runtime.allocated_bytes()
        del self._tensors[name]
        return min(self._num_bytes[name], before - self._runtime.allocated_bytes())

    def restore(self, name: str) -> Tensor:
        """Return the buffer, allocated again if it was released; its address may differ.

        Raises ConfigError if memory is short.
        """
        if name not in self._tensors:
            self._tensors[name] = self._empty(name, self._num_bytes[name])
        return self._tensors[name]

    def _empty(self, name: str, num_bytes: int) -> Tensor:
        try:
            return torch.empty(num_bytes, dtype=torch.uint8, device=self._runtime.device)
        except torch.cuda.OutOfMemoryError as error:
            raise too_large(name, num_bytes, self._runtime.free_bytes()) from error
