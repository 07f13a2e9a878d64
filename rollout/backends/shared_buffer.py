"""A buffer of one process that others of its machine map: in host memory, or on a CUDA device.

An address is text, which any process may be told: of host memory its anonymous file, of a device
its UUID and the handle of CUDA IPC. No test has run the latter: that takes a GPU.
"""

from __future__ import annotations

import mmap
import os
import re
from dataclasses import dataclass

import torch
from torch import Tensor

from rollout.backends.cuda.runtime import CudaRuntime
from rollout.errors import ConfigError

HOST, DEVICE = "host", "cuda"
_NAME = "rollout-bucket"
_FILE = re.compile(r"/proc/[0-9]+/fd/[0-9]+")


@dataclass(frozen=True, slots=True)
class SharedBuffer:
    """bytes_N: uint8, which lives as long as its views. address: for `open_shared_buffer`."""

    bytes_N: Tensor
    address: str


def require_place(place: str) -> None:
    """Raise ConfigError unless buffers can be there."""
    if place == DEVICE:
        CudaRuntime(torch.device(DEVICE))
    elif place != HOST or not hasattr(os, "memfd_create"):
        raise ConfigError(
            f"no buffer of {place!r} can be shared here; only on Linux, of host or cuda"
        )


def create_shared_buffer(place: str, num_bytes: int) -> SharedBuffer:
    """A buffer on the host or on the current CUDA device, where `require_place` raises nothing.

    Raises OSError, MemoryError and RuntimeError if there is no memory.
    """
    if place == DEVICE:
        runtime = CudaRuntime(torch.device(DEVICE))
        bytes_N, handle = runtime.exported_tensor(num_bytes)
        return SharedBuffer(bytes_N, f"{runtime.uuid} {handle.hex()}")
    descriptor = os.memfd_create(_NAME, os.MFD_CLOEXEC)
    os.ftruncate(descriptor, num_bytes)
    bytes_N = torch.frombuffer(mmap.mmap(descriptor, num_bytes), dtype=torch.uint8)
    return SharedBuffer(bytes_N, f"/proc/{os.getpid()}/fd/{descriptor}")


def close_shared_buffer(buffer: SharedBuffer) -> None:
    """Let nobody map it from now on; who has it mapped keeps it, in host memory."""
    if _FILE.fullmatch(buffer.address):
        os.close(int(buffer.address.rpartition("/")[2]))


def open_shared_buffer(place: str, address: str, num_bytes: int) -> Tensor:
    """The bytes of another process's buffer, uint8 [num_bytes], to be read only.

    Raises OSError, RuntimeError and ValueError if it is not there, or not as large.
    """
    if place == DEVICE:
        uuid, _, handle = address.partition(" ")
        return CudaRuntime.of_uuid(uuid).opened_tensor(bytes.fromhex(handle), num_bytes)
    if not _FILE.fullmatch(address):
        raise ValueError(f"{address!r} is no address of a buffer")
    descriptor = os.open(address, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        if os.readlink(f"/proc/self/fd/{descriptor}") != f"/memfd:{_NAME} (deleted)":
            raise ValueError(f"{address!r} is no buffer any more")
        if os.fstat(descriptor).st_size < num_bytes:
            raise ValueError(f"the buffer at {address!r} has less than {num_bytes} bytes")
        # Torch wants writable memory. A page of a private mapping shows what the file has, as long
        # as nobody writes to the page here.
        region = mmap.mmap(descriptor, num_bytes, flags=mmap.MAP_PRIVATE)
    finally:
        os.close(descriptor)
    return torch.frombuffer(region, dtype=torch.uint8)
