"""CudaDeviceMemory: the memory kind "device", buffers of torch's own allocator.

Created by `rollout.backends.cuda.backend`. `rollout.worker.kv_cache` and `rollout.weights.memory`
use it through `MemoryBackend`. A restored buffer is a new tensor.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rollout.backends.cuda.runtime import CudaMemory, CudaRuntime, too_large


class CudaDeviceMemory(CudaMemory):
    """`MemoryBackend` with torch's own allocator. The device gets a released buffer's memory back
    at `trim`, after the caller has dropped all views of the buffer."""

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
        """Drop the buffer. Return the bytes that became free in torch's allocator; 0 while a view
        of the buffer exists, or if it was released already."""
        if name not in self._tensors:
            return 0
        before = self._runtime.allocated_bytes()
        del self._tensors[name]
        return min(self._num_bytes[name], before - self._runtime.allocated_bytes())

    def restore(self, name: str) -> Tensor:
        """Return the buffer. A released buffer is allocated anew, with undefined contents, most
        likely at another address. Raises ConfigError if memory is short."""
        if name not in self._tensors:
            self._tensors[name] = self._empty(name, self._num_bytes[name])
        return self._tensors[name]

    def _empty(self, name: str, num_bytes: int) -> Tensor:
        try:
            return torch.empty(num_bytes, dtype=torch.uint8, device=self._runtime.device)
        except torch.cuda.OutOfMemoryError as error:
            raise too_large(name, num_bytes, self._runtime.free_bytes()) from error
