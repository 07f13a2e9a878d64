"""CudaRuntime: one CUDA device's memory operations, through torch, libcudart and libcuda.

Used by `rollout.backends.cuda.backend`, by the memory kinds (`device_memory`, `memory_saver`,
`unified`, `vmm`), which extend CudaMemory, by `rollout.backends.cuda.pinned_host` and by
`rollout.backends.shared_buffer`.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rollout.backends.cuda.cudart import HOST, Cudart
from rollout.backends.cuda.driver import CudaDriver
from rollout.errors import ConfigError


class CudaRuntime:
    """Memory operations of one device. Creating it initializes CUDA. Raises ConfigError if torch
    sees no CUDA device."""

    def __init__(self, device: torch.device) -> None:
        if not torch.cuda.is_available():
            raise ConfigError(
                f"device={str(device)!r}: torch sees no CUDA device; use device='cpu'"
            )
        torch.cuda.init()
        index = torch.cuda.current_device() if device.index is None else device.index
        self.device = torch.device("cuda", index)

    @classmethod
    def of_uuid(cls, uuid: str) -> CudaRuntime:
        """Return the runtime of the device with that UUID. Raises RuntimeError if the device is not
        visible to this process."""
        for index in range(torch.cuda.device_count()):
            runtime = cls(torch.device("cuda", index))
            if runtime.uuid == uuid:
                return runtime
        raise RuntimeError(f"the device {uuid} is not visible here; add it to CUDA_VISIBLE_DEVICES")

    @property
    def uuid(self) -> str:
        """The device's UUID, the same in all processes."""
        return str(torch.cuda.get_device_properties(self.device).uuid)

    def as_current(self) -> AbstractContextManager[Any]:
        """Return a context manager that makes this device current in the thread."""
        return torch.cuda.device(self.device)

    def free_bytes(self) -> int:
        """Return the bytes of the device that any process can still allocate."""
        return torch.cuda.mem_get_info(self.device)[0]

    def allocated_bytes(self) -> int:
        """Return the bytes that tensors use in torch's allocator."""
        return torch.cuda.memory_allocated(self.device)

    def empty_cache(self) -> None:
        """Return cached memory of torch's allocator to the device."""
        with self.as_current():
            torch.cuda.empty_cache()

    def synchronize(self) -> None:
        """Wait until the device has finished all queued work."""
        torch.cuda.synchronize(self.device)

    def tensor_at(self, pointer: int, num_bytes: int, free: Callable[[int], None]) -> Tensor:
        """Return a flat uint8 tensor over the memory at this address. `free(pointer)` is called
        after the tensor's last view is gone, or if this raises."""
        owned = OwnedBytes(pointer, num_bytes, free)
        try:
            return self._as_tensor(owned)
        except BaseException:
            owned.free()
            raise

    def managed_tensor(self, num_bytes: int) -> Tensor:
        """Return a flat uint8 tensor of managed memory, freed with its last view. Its contents are
        undefined. Raises MemoryError if memory is short."""
        with self.as_current():
            pointer = self._cudart.malloc_managed(num_bytes)
            return self.tensor_at(pointer, num_bytes, self._cudart.free)

    def exported_tensor(self, num_bytes: int) -> tuple[Tensor, bytes]:
        """Return a flat uint8 tensor of device memory, and a handle to open it in other processes.
        The memory is freed with its last view. Its contents are undefined. Raises MemoryError if
        memory is short."""
        with self.as_current():
            pointer = self._cudart.malloc(num_bytes)
            owned = OwnedBytes(pointer, num_bytes, self._cudart.free)
            try:
                return self._as_tensor(owned), self._cudart.ipc_handle(pointer)
            except BaseException:
                owned.free()
                raise

    def opened_tensor(self, handle: bytes, num_bytes: int) -> Tensor:
        """Return memory that another process has exported, as a flat uint8 tensor, closed with its
        last view. Raises RuntimeError if the memory is gone, or belongs to this process."""
        with self.as_current():
            pointer = self._cudart.ipc_open(handle)
            return self.tensor_at(pointer, num_bytes, self._cudart.ipc_close)

    def move_to_device(self, tensor: Tensor) -> None:
        """Move all pages of a managed tensor to the device, and keep them there."""
        self._move(tensor, self.device.index)

    def move_to_host(self, tensor: Tensor) -> None:
        """Move all pages of a managed tensor to host memory, which frees the device's pages."""
        self._move(tensor, HOST)

    def pin(self, tensor: Tensor) -> None:
        """Page-lock a host tensor. Raises MemoryError or RuntimeError if CUDA refuses."""
        with self.as_current():
            self._cudart.host_register(tensor.data_ptr(), tensor.numel())

    def unpin(self, tensor: Tensor) -> None:
        """Wait for the device, so that no copy uses the tensor, and undo `pin`."""
        self.synchronize()
        self._cudart.host_unregister(tensor.data_ptr())

    def _move(self, tensor: Tensor, place: int) -> None:
        with self.as_current():
            self.synchronize()  # any stream may still use the pages
            self._cudart.prefer(tensor.data_ptr(), tensor.numel(), place)
            self._cudart.prefetch(tensor.data_ptr(), tensor.numel(), place)
            self.synchronize()  # afterwards, the number of free bytes is right

    def _as_tensor(self, owned: OwnedBytes) -> Tensor:
        tensor = torch.as_tensor(owned, device=self.device)
        assert tensor.data_ptr() == owned.pointer, "torch copied the memory"
        return tensor

    @cached_property
    def driver(self) -> CudaDriver:
        """The driver's virtual memory management. Raises ConfigError without libcuda."""
        try:
            return CudaDriver(ctypes.CDLL("libcuda.so.1"))
        except OSError as error:
            raise ConfigError(
                f"memory_kind='vmm' needs libcuda.so.1 ({error}); use memory_kind='device'"
            ) from error

    @cached_property
    def _cudart(self) -> Cudart:
        return Cudart(_loaded_cudart())


class OwnedBytes:
    """Owner of memory of CUDA. A tensor that torch makes from `__cuda_array_interface__` keeps the
    owner alive."""

    def __init__(self, pointer: int, num_bytes: int, free: Callable[[int], None]) -> None:
        """`free` is called once with the pointer, after the last view is gone or by
        `self.free()`."""
        self.pointer = pointer
        self.free = weakref.finalize(self, free, self.pointer)
        self.free.atexit = False  # other views may be in use until the process ends
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (self.pointer, False),
            "version": 3,
        }


class CudaMemory:
    """Base class of the memory kinds of a CUDA device, with their runtime and their buffers by
    name."""

    def __init__(self, runtime: CudaRuntime) -> None:
        self._runtime = runtime
        self._tensors: dict[str, Tensor] = {}

    def trim(self) -> None:
        """Return cached memory of torch's allocator to the device."""
        self._runtime.empty_cache()


def _loaded_cudart() -> ctypes.CDLL:
    """Return the libcudart that torch uses. Raises ConfigError if torch loaded none."""
    # Another copy would have its own state.
    major = str(torch.version.cuda).partition(".")[0]
    for line in Path("/proc/self/maps").read_text().splitlines():
        path = line.split(maxsplit=5)[-1]
        name = Path(path).name
        if name.startswith("libcudart") and f".so.{major}" in name:
            return ctypes.CDLL(path)
    raise ConfigError(
        f"torch loaded no libcudart of CUDA {major}; use memory_kind='device' and a build of "
        "torch that links it dynamically"
    )


def require_free(runtime: CudaRuntime, name: str, num_bytes: int) -> None:
    """Raise ConfigError, with both figures, unless the device has `num_bytes` free for a buffer.
    Empties the cache of torch's allocator if memory is short."""
    if num_bytes > runtime.free_bytes():
        runtime.empty_cache()
    free = runtime.free_bytes()
    if num_bytes > free:
        raise too_large(name, num_bytes, free)


def too_large(name: str, num_bytes: int, free: int) -> ConfigError:
    """Return the error for a buffer that does not fit into the device's free memory."""
    return ConfigError(
        f"cannot allocate {num_bytes} bytes for buffer {name!r}: the device has {free} bytes free; "
        "lower buffer_size_gb, or free memory of other processes"
    )
