"""VirtualMemory: the memory kind "vmm", by CUDA's virtual memory management.

Created by `rollout.backends.cuda.backend`. `rollout.worker.kv_cache` and `rollout.weights.memory`
use it through `MemoryBackend`. "vmm" is CUDA's default memory kind, unless
`kv_cache_management_mode` is "persist" or `unified_memory_level` is set. Released buffers keep
their addresses.
"""

from __future__ import annotations

from functools import partial

from torch import Tensor

from rollout.backends.cuda.driver import CudaDriver
from rollout.backends.cuda.runtime import CudaMemory, CudaRuntime, require_free, too_large
from rollout.errors import ConfigError


class VirtualMemory(CudaMemory):
    """`MemoryBackend` with CUDA's virtual memory management.

    A buffer's addresses are reserved once, for the life of its tensors. `release` unmaps and frees
    its memory. `restore` maps new memory at the same addresses, so that captured graphs stay valid.
    Torch's allocator settings, such as expandable segments, have no effect on this memory. If
    memory is short, torch's cache is emptied. If that is not enough, the call raises and changes no
    buffer.
    """

    has_stable_addresses = True

    def __init__(self, runtime: CudaRuntime) -> None:
        """Raise ConfigError if the device's driver has no virtual memory management."""
        super().__init__(runtime)
        if not runtime.driver.has_virtual_memory(runtime.device.index):
            raise ConfigError(
                f"memory_kind='vmm' is not available on {runtime.device}: its driver manages no "
                "virtual memory; use memory_kind='device' with static_kv_memory_pointers=False"
            )
        self._granularity = runtime.driver.granularity(runtime.device.index)
        self._regions: dict[str, _Region] = {}

    def allocate(self, name: str, num_bytes: int) -> Tensor:
        """Return a new flat uint8 tensor, zero-filled. Raises ConfigError if memory is short."""
        assert name not in self._tensors, f"buffer {name!r} exists"
        with self._runtime.as_current():
            region = self._region(name, max(1, num_bytes))
            try:
                self._back(name, region)
            except BaseException:
                region.free()
                raise
            free = partial(_free_unused, self._runtime, region)
            tensor = self._runtime.tensor_at(region.address, num_bytes, free)
        self._regions[name], self._tensors[name] = region, tensor
        return tensor.zero_()

    def release(self, name: str) -> int:
        """Release the buffer's memory. Return its number of bytes; 0 if it was released already."""
        region = self._regions[name]
        if not region.is_backed:
            return 0
        self._runtime.synchronize()  # no kernel may use the memory while it is unmapped
        with self._runtime.as_current():
            region.unback()
        return self._tensors[name].numel()

    def restore(self, name: str) -> Tensor:
        """Return the same tensor with memory again. Raises ConfigError if memory is short."""
        with self._runtime.as_current():
            self._back(name, self._regions[name])
        return self._tensors[name]

    def _region(self, name: str, num_bytes: int) -> _Region:
        num_bytes = -(-num_bytes // self._granularity) * self._granularity
        # Check first: CUDA's error for too many addresses need not say that memory is short.
        require_free(self._runtime, name, num_bytes)
        try:
            return _Region(self._runtime.driver, self._runtime.device.index, num_bytes)
        except MemoryError as error:
            raise ConfigError(
                f"cannot reserve {num_bytes} bytes of addresses for buffer {name!r} ({error}); use "
                "memory_kind='device' with static_kv_memory_pointers=False"
            ) from error

    def _back(self, name: str, region: _Region) -> None:
        try:
            region.back()
        except MemoryError:
            self._runtime.empty_cache()  # the missing memory may be in torch's cache
            try:
                region.back()
            except MemoryError as error:
                free = self._runtime.free_bytes()
                raise too_large(name, region.num_bytes, free) from error


class _Region:
    """Reserved addresses, and the memory that is mapped there, if any."""

    def __init__(self, driver: CudaDriver, device: int, num_bytes: int) -> None:
        self._driver, self._device, self.num_bytes = driver, device, num_bytes
        self.address = driver.reserve(num_bytes)
        self._handle: int | None = None
        self._is_mapped = self._is_usable = False

    @property
    def is_backed(self) -> bool:
        """Whether memory is allocated. After a failed call it can be allocated but not mapped."""
        return self._handle is not None

    def back(self) -> None:
        """Allocate and map memory. Raises MemoryError or RuntimeError, and then the region has no
        memory."""
        if self._is_usable:
            return
        driver, where = self._driver, (self.address, self.num_bytes)
        try:
            if self._handle is None:
                self._handle = driver.create(self.num_bytes, self._device)
            if not self._is_mapped:
                driver.map(*where, self._handle)
                self._is_mapped = True
            driver.allow(*where, self._device)
            self._is_usable = True
        except BaseException:
            self.unback()
            raise

    def unback(self) -> None:
        """Unmap and free the memory. After an exception, another call continues where it failed."""
        self._is_usable = False
        if self._is_mapped:
            self._driver.unmap(self.address, self.num_bytes)
            self._is_mapped = False
        if self._handle is not None:
            self._driver.release(self._handle)
            self._handle = None

    def free(self) -> None:
        self.unback()
        self._driver.free_reserved(self.address, self.num_bytes)


def _free_unused(runtime: CudaRuntime, region: _Region, _address: int) -> None:
    try:
        if region.is_backed:
            runtime.synchronize()  # an abandoned step may still use it
    finally:
        region.free()
