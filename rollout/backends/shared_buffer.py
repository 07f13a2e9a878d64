"""Buffers that other processes of the machine can map, in host memory or on a CUDA device.

Used by `rollout.weights.transports.buckets` and `rollout.weights.transports.collective`. An address
is text that can be sent to any process. For host memory it is the path of an anonymous file. For a
CUDA device it is the device's UUID and a CUDA IPC handle.
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
    """A shared buffer in the process that created it. `bytes_N` is the memory as uint8, freed with
    its last view. `address` is the argument of `open_shared_buffer` in another process."""

    bytes_N: Tensor
    address: str


def require_place(place: str) -> None:
    """Raise ConfigError unless this machine can share buffers at `place`, HOST or DEVICE."""
    if place == DEVICE:
        CudaRuntime(torch.device(DEVICE))
    elif place != HOST or not hasattr(os, "memfd_create"):
        raise ConfigError(
            f"buffers on {place!r} cannot be shared here: use Linux, and 'host' or 'cuda'"
        )


def create_shared_buffer(place: str, num_bytes: int) -> SharedBuffer:
    """Return a new buffer in host memory or on the current CUDA device, as `place` says. Call
    `require_place` before. Raises OSError, MemoryError or RuntimeError if memory is short."""
    if place == DEVICE:
        runtime = CudaRuntime(torch.device(DEVICE))
        bytes_N, handle = runtime.exported_tensor(num_bytes)
        return SharedBuffer(bytes_N, f"{runtime.uuid} {handle.hex()}")
    descriptor = os.memfd_create(_NAME, os.MFD_CLOEXEC)
    os.ftruncate(descriptor, num_bytes)
    bytes_N = torch.frombuffer(mmap.mmap(descriptor, num_bytes), dtype=torch.uint8)
    return SharedBuffer(bytes_N, f"/proc/{os.getpid()}/fd/{descriptor}")


def close_shared_buffer(buffer: SharedBuffer) -> None:
    """Close the buffer's file, so that no other process can map the buffer any more. Existing
    mappings stay. No-op for a buffer on a device."""
    if _FILE.fullmatch(buffer.address):
        os.close(int(buffer.address.rpartition("/")[2]))


def open_shared_buffer(place: str, address: str, num_bytes: int) -> Tensor:
    """Map another process's buffer and return it, uint8 [num_bytes]. The caller must not write it.
    Raises OSError, RuntimeError or ValueError if the buffer does not exist or is smaller."""
    if place == DEVICE:
        uuid, _, handle = address.partition(" ")
        return CudaRuntime.of_uuid(uuid).opened_tensor(bytes.fromhex(handle), num_bytes)
    if not _FILE.fullmatch(address):
        raise ValueError(f"{address!r} is not an address of a shared buffer")
    descriptor = os.open(address, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        if os.readlink(f"/proc/self/fd/{descriptor}") != f"/memfd:{_NAME} (deleted)":
            raise ValueError(f"{address!r} is not a shared buffer any more")
        if os.fstat(descriptor).st_size < num_bytes:
            raise ValueError(f"the buffer at {address!r} has less than {num_bytes} bytes")
        # Torch wants writable memory. A page of a private mapping shows the file's bytes until
        # this process writes to the page.
        region = mmap.mmap(descriptor, num_bytes, flags=mmap.MAP_PRIVATE)
    finally:
        os.close(descriptor)
    return torch.frombuffer(region, dtype=torch.uint8)
