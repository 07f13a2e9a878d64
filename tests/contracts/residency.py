"""Meters of the memory that the system, or the device, really uses."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

_PRESENT = np.uint64(1 << 63)


@dataclass(frozen=True, kw_only=True)
class Meter:
    """Reads the bytes in use. A buffer of `size` stands out; up to `slack` may be other memory."""

    read: Callable[[], int]
    size: int
    slack: int


def host_meter() -> Meter:
    """Return a meter of this process's resident bytes."""
    return Meter(read=process_resident_bytes, size=24 << 20, slack=2 << 20)


def device_meter() -> Meter:
    """Return a meter of the device's bytes in use. First loads the kernels that tests use."""
    _warm_up()
    return Meter(read=device_used_bytes, size=256 << 20, slack=32 << 20)


def host_meter_beside_a_device() -> Meter:
    """As `host_meter`, for a process in which the CUDA driver uses memory as well."""
    _warm_up()
    return Meter(read=process_resident_bytes, size=256 << 20, slack=32 << 20)


def resident_bytes(buffer: Tensor) -> int:
    """Return the bytes of the pages under `buffer` that are in memory.

    Read from pagemap: smaps would count neighbours, since the system merges adjacent mappings.
    """
    first = buffer.data_ptr() // mmap.PAGESIZE
    last = (buffer.data_ptr() + buffer.numel() * buffer.element_size() - 1) // mmap.PAGESIZE
    with Path("/proc/self/pagemap").open("rb", buffering=0) as pagemap:
        pagemap.seek(first * 8)
        entries = np.frombuffer(pagemap.read((last - first + 1) * 8), dtype=np.uint64)
    return int(((entries & _PRESENT) != 0).sum()) * mmap.PAGESIZE


def process_resident_bytes() -> int:
    """Return the resident bytes of the whole process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


def device_used_bytes() -> int:
    """Return the bytes of the current CUDA device in use by any process, without torch's cache."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    return total - free


def _warm_up() -> None:
    scratch = torch.zeros(4096, dtype=torch.uint8, device="cuda")
    assert not bool(scratch.fill_(0).any())
    assert bool((scratch == 0).all())
    scratch.copy_(scratch.cpu().pin_memory(), non_blocking=True)
    torch.cuda.synchronize()
