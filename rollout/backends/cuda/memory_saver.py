"""MemorySaverMemory: the memory kind "torch_memory_saver", by the package of that name.

Created by `rollout.backends.cuda.backend`. `rollout.worker.kv_cache` and `rollout.weights.memory`
use it through `MemoryBackend`. Released buffers keep their addresses. `scripts.check_extras`
imports it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import uuid
from typing import Any

import torch
from torch import Tensor

from rollout.backends.cuda.runtime import CudaMemory, CudaRuntime, require_free
from rollout.errors import ConfigError

_ALLOCATOR_SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
# Torch's allocator allocates multiples of 2 MiB from the device, and 20 MiB for most small tensors.
_SMALLEST_SEGMENT, _SEGMENT_STEP = 20 << 20, 2 << 20


class MemorySaverMemory(CudaMemory):
    """`MemoryBackend` with the package torch-memory-saver (tested: 0.0.10).

    `release` unmaps the device's pages from addresses that stay reserved, and `restore` maps new
    pages. The package hooks into torch's allocator. In a process that was started with the
    package's library in LD_PRELOAD it uses that library instead.

    If CUDA refuses memory, the package ends the process with exit(1). Free memory is checked first,
    but another process can allocate it in between. VirtualMemory does not have this problem.
    Buffers that are not released keep their memory for the life of the process, also after this
    object is freed.
    """

    has_stable_addresses = True

    def __init__(self, runtime: CudaRuntime) -> None:
        """Raise ConfigError if the package is missing, or incompatible with torch's settings."""
        _refuse_expandable_segments()
        super().__init__(runtime)
        self._saver = _saver()
        # The whole process shares the package's tags.
        self._tag_suffix = uuid.uuid4().hex
        self._released: set[str] = set()

    def allocate(self, name: str, num_bytes: int) -> Tensor:
        """Return a new flat uint8 tensor, zero-filled. Raises ConfigError if memory is short."""
        assert name not in self._tensors, f"buffer {name!r} exists"
        require_free(self._runtime, name, _segment_bytes(num_bytes))
        region = self._saver.region(tag=self._tag(name), enable_cpu_backup=False)
        with self._runtime.as_current(), region:
            tensor = torch.empty(num_bytes, dtype=torch.uint8, device=self._runtime.device)
        self._tensors[name] = tensor.zero_()
        return tensor

    def release(self, name: str) -> int:
        """Release the buffer's memory. Return its number of bytes; 0 if it was released already."""
        if name in self._released:  # a second pause would make the package end the process
            return 0
        self._runtime.synchronize()  # no kernel may use the pages while they are unmapped
        self._saver.pause(self._tag(name))
        self._released.add(name)
        return self._tensors[name].numel()

    def restore(self, name: str) -> Tensor:
        """Return the same tensor, at the same address. Raises ConfigError if memory is short."""
        tensor = self._tensors[name]
        if name in self._released:
            # The package ends the process if CUDA refuses memory.
            require_free(self._runtime, name, _segment_bytes(tensor.numel()))
            self._saver.resume(self._tag(name))
            self._released.remove(name)
        return tensor

    def _tag(self, name: str) -> str:
        return f"{name}-{self._tag_suffix}"


def _saver() -> Any:
    try:
        from torch_memory_saver import torch_memory_saver as saver
    except ImportError as error:
        raise ConfigError(
            f"memory_kind='torch_memory_saver' needs the package torch-memory-saver ({error}): "
            "pip install torch-memory-saver (extra 'gpu'), or use memory_kind='vmm' or 'device'"
        ) from error
    if "torch_memory_saver" not in os.environ.get("LD_PRELOAD", ""):
        with contextlib.suppress(AttributeError):  # already used: the mode cannot change
            saver.hook_mode = "torch"
    # Never collected: its pools would free their memory at the end of the process, outside all
    # regions, and then the package calls exit(1).
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(saver))
    return saver


def _refuse_expandable_segments() -> None:
    for variable in _ALLOCATOR_SETTINGS:
        settings = os.environ.get(variable, "")
        if "expandable_segments:true" in settings.lower().replace(" ", ""):
            raise ConfigError(
                f"{variable}={settings!r} is incompatible with memory_kind='torch_memory_saver': "
                "remove expandable_segments from it, or use memory_kind='vmm' or 'device'"
            )


def _segment_bytes(num_bytes: int) -> int:
    """Return the most bytes that torch's allocator allocates for a tensor of `num_bytes`."""
    return max(_SMALLEST_SEGMENT, -(-num_bytes // _SEGMENT_STEP) * _SEGMENT_STEP)
