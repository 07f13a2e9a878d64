"""resident_bytes: the bytes of a buffer that take physical memory now.

Used by `rollout.worker.kv_cache` and `rollout.weights.memory` for an engine's memory report.
"""

from __future__ import annotations

import ctypes
import mmap
from functools import cache
from typing import Any

import numpy as np
from torch import Tensor

from rollout.backends.cpu.mapping import frees_pages_in_place

_IN_MEMORY = 1  # bit of mincore's result; the other bits are reserved


def resident_bytes(buffer: Tensor) -> int:
    """Return the bytes of a flat uint8 buffer that take physical memory now. For a CPU buffer on
    Linux, only its resident pages count: mostly pages that were written to. On a device, and on
    other systems, all bytes count."""
    num_bytes = buffer.numel()
    mincore = _mincore()
    if buffer.device.type != "cpu" or mincore is None or not num_bytes:
        return num_bytes
    start = buffer.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
    length = buffer.data_ptr() + num_bytes - start
    pages_P = np.empty(-(-length // mmap.PAGESIZE), dtype=np.uint8)
    address, answer = ctypes.c_void_p(start), ctypes.c_void_p(pages_P.ctypes.data)
    if mincore(address, ctypes.c_size_t(length), answer) != 0:
        return num_bytes
    num_pages = int(np.count_nonzero(pages_P & _IN_MEMORY))
    return min(num_bytes, num_pages * mmap.PAGESIZE)


@cache
def _mincore() -> Any:
    """Return the C library's mincore; None on systems other than Linux."""
    return getattr(ctypes.CDLL(None), "mincore", None) if frees_pages_in_place() else None
