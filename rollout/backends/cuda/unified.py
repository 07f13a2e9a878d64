"""UnifiedMemory: managed buffers that move to host memory and keep their addresses."""

from __future__ import annotations

from torch import Tensor

from rollout.backends.cuda.runtime import CudaRuntime, require_free
from rollout.errors import ConfigError


class UnifiedMemory:
    """Implements `MemoryBackend` with memory that the host and the device share.

    While released, a buffer lies in host memory, so `release` costs as much of that as it frees on
    the device, and a copy each way. CUDA has no call that takes both places' pages away and leaves
    the address valid: discarded pages stay until the driver wants them, and madvise does not reach
    the driver's pages. Where host memory is short, use VirtualMemory.
    """

    has_stable_addresses = True

    def __init__(self, runtime: CudaRuntime) -> None:
        self._runtime = runtime
        self._tensors: dict[str, Tensor] = {}
        self._moved_out: set[str] = set()  # not surely on the device, if a move failed

    def allocate(self, name: str, num_bytes: int) -> Tensor:
        """A flat uint8 tensor, zero-filled.

        Raises ConfigError if the device has less free: more could be had, but then pages move to
        and fro at every step, which can hang a device.
        """
        assert name not in self._tensors, f"buffer {name!r} exists"
        require_free(self._runtime, name, num_bytes)
        try:
            tensor = self._runtime.managed_tensor(num_bytes)
        except MemoryError as error:
            raise ConfigError(
                f"no {num_bytes} bytes to be had for buffer {name!r} ({error}); "
                "lower buffer_size_gb"
            ) from error
        self._runtime.move_to_device(tensor)
        self._tensors[name] = tensor.zero_()
        return tensor

    def release(self, name: str) -> int:
        """Move the buffer to host memory. Returns its bytes."""
        tensor = self._tensors[name]
        self._moved_out.add(name)
        self._runtime.move_to_host(tensor)
        return tensor.numel()

    def trim(self) -> None:
        """Give back what torch's own allocator keeps for later."""
        self._runtime.empty_cache()

    def restore(self, name: str) -> Tensor:
        """The same tensor, on the device. Raises ConfigError if the device has less free."""
        tensor = self._tensors[name]
        if name in self._moved_out:
            require_free(self._runtime, name, tensor.numel())
            self._runtime.move_to_device(tensor)
            self._moved_out.remove(name)
        return tensor
