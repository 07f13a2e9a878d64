"""How much memory the system really holds, from /proc/self."""

from __future__ import annotations

import mmap
from pathlib import Path

import numpy as np
from torch import Tensor

_PRESENT = np.uint64(1 << 63)


def resident_bytes(buffer: Tensor) -> int:
    """Bytes of the pages under `buffer` that are in memory.

    Read from pagemap: smaps would count neighbours, since the system merges adjacent mappings.
    """
    first = buffer.data_ptr() // mmap.PAGESIZE
    last = (buffer.data_ptr() + buffer.numel() * buffer.element_size() - 1) // mmap.PAGESIZE
    with Path("/proc/self/pagemap").open("rb", buffering=0) as pagemap:
        pagemap.seek(first * 8)
        entries = np.frombuffer(pagemap.read((last - first + 1) * 8), dtype=np.uint64)
    return int(((entries & _PRESENT) != 0).sum()) * mmap.PAGESIZE


def process_resident_bytes() -> int:
    """Resident bytes of the whole process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE
