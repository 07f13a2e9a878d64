"""UnifiedMemory: the memory kind "unified", managed buffers that move between host and device.

Created by `rollout.backends.cuda.backend`. `rollout.worker.kv_cache` and `rollout.weights.memory`
use it through `MemoryBackend`. Released buffers keep their addresses.
"""

from __future__ import annotations

from torch import Tensor

from rollout.backends.cuda.runtime import CudaMemory, CudaRuntime, require_free
from rollout.errors import ConfigError


class UnifiedMemory(CudaMemory):
    """`MemoryBackend` with memory that the host and the device share. A released buffer is in host
    memory. So `release` takes as many bytes of host memory as it frees on the device, and each move
    is a copy. Use VirtualMemory if host memory is short."""

    has_stable_addresses = True

    def __init__(self, runtime: CudaRuntime) -> None:
        super().__init__(runtime)
        self._moved_out: set[str] = set()  # buffers in host memory, or anywhere if a move failed

    def allocate(self, name: str, num_bytes: int) -> Tensor:
        """Return a new flat uint8 tensor, zero-filled. Raises ConfigError if the device has fewer
        bytes free."""
        assert name not in self._tensors, f"buffer {name!r} exists"
        # CUDA would allocate more than is free, but pages would then move at every step, which can
        # hang a device.
        require_free(self._runtime, name, num_bytes)
        try:
            tensor = self._runtime.managed_tensor(num_bytes)
        except MemoryError as error:
            raise ConfigError(
                f"cannot allocate {num_bytes} bytes for buffer {name!r} ({error}); "
                "lower buffer_size_gb"
            ) from error
        self._runtime.move_to_device(tensor)
        self._tensors[name] = tensor.zero_()
        return tensor

    def release(self, name: str) -> int:
        """Move the buffer to host memory. Return its number of bytes."""
        # CUDA has no call that frees managed pages everywhere and keeps their addresses: discarded
        # pages stay until the driver needs them, and madvise has no effect on them.
        tensor = self._tensors[name]
        self._moved_out.add(name)
        self._runtime.move_to_host(tensor)
        return tensor.numel()

    def restore(self, name: str) -> Tensor:
        """Move the buffer back to the device and return it. Raises ConfigError if memory is
        short."""
        tensor = self._tensors[name]
        if name in self._moved_out:
            require_free(self._runtime, name, tensor.numel())
            self._runtime.move_to_device(tensor)
            self._moved_out.remove(name)
        return tensor
