"""CudaDeviceMemory: plain device buffers, dropped to release them and allocated anew."""

from __future__ import annotations

import torch
from torch import Tensor

from rollout.backends.cuda.runtime import CudaRuntime, too_large


class CudaDeviceMemory:
    """Implements `MemoryBackend` with torch's own allocator.

    Memory goes back to the device once the caller has dropped its own views, too.
    """

    has_stable_addresses = False

    def __init__(self, runtime: CudaRuntime) -> None:
        self._runtime = runtime
        self._num_bytes: dict[str, int] = {}
        self._tensors: dict[str, Tensor] = {}

    def allocate(self, name: str, num_bytes: int) -> Tensor:
        """A flat uint8 tensor, zero-filled. Raises ConfigError if the memory is not to be had."""
        assert name not in self._num_bytes, f"buffer {name!r} exists"
        self._tensors[name] = self._empty(name, num_bytes).zero_()
        self._num_bytes[name] = num_bytes
        return self._tensors[name]

    def release(self, name: str) -> int:
        """Drop the buffer. Returns its bytes, which the device has back after `trim`.

        That is 0 while a view of it is alive, and if it was released already.
        """
        if name not in self._tensors:
            return 0
        before = self._runtime.allocated_bytes()
        del self._tensors[name]
        return min(self._num_bytes[name], before - self._runtime.allocated_bytes())

    def trim(self) -> None:
        """Give back what torch's own allocator keeps for later."""
        self._runtime.empty_cache()

    def restore(self, name: str) -> Tensor:
        """The buffer, allocated anew if it was released; its address may differ.

        Raises ConfigError if the memory is not to be had.
        """
        if name not in self._tensors:
            self._tensors[name] = self._empty(name, self._num_bytes[name])
        return self._tensors[name]

    def _empty(self, name: str, num_bytes: int) -> Tensor:
        try:
            return torch.empty(num_bytes, dtype=torch.uint8, device=self._runtime.device)
        except torch.cuda.OutOfMemoryError as error:
            raise too_large(name, num_bytes, self._runtime.free_bytes()) from error
