"""Bytes that processes of one machine share: an anonymous file that all of them map. Linux only."""

from __future__ import annotations

import mmap
import os

import torch
from torch import Tensor

from rollout.errors import ConfigError, LockstepError


class SharedMemory:
    """`bytes_N`, uint8, are the same memory in all processes that opened `address`.

    It has no name that could be left behind: the system frees it with the last process.
    """

    def __init__(self, num_bytes: int) -> None:
        """Zero-filled. A page takes memory once it is written to. Raises ConfigError."""
        if not hasattr(os, "memfd_create"):
            raise ConfigError(
                "tensor_parallel_size above 1 on a CPU needs Linux (memfd_create); use 1"
            )
        self._descriptor: int | None = os.memfd_create("rollout-ranks", os.MFD_CLOEXEC)
        try:
            os.ftruncate(self._descriptor, num_bytes)
            self.bytes_N = _mapped(self._descriptor)
        except OSError as error:
            os.close(self._descriptor)
            raise ConfigError(f"no shared memory for {num_bytes} bytes ({error})") from error
        self.address = f"/proc/{os.getpid()}/fd/{self._descriptor}"

    def close(self) -> None:
        """No further process can open it; those that have keep it. A second call does nothing."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def open_shared(address: str) -> Tensor:
    """The bytes of the SharedMemory at `address`, of a process that lives. Raises LockstepError."""
    try:
        descriptor = os.open(address, os.O_RDWR | os.O_CLOEXEC)
        try:
            return _mapped(descriptor)
        finally:
            os.close(descriptor)
    except (OSError, ValueError) as error:
        raise LockstepError(
            f"the memory at {address} of rank 0 cannot be opened: {error}"
        ) from error


def _mapped(descriptor: int) -> Tensor:
    return torch.frombuffer(mmap.mmap(descriptor, 0), dtype=torch.uint8)
