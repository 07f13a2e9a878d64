"""Private anonymous mappings as tensors: host memory whose pages really go back to the system.

malloc keeps freed memory below its mmap threshold (which grows up to 32 MiB) for itself, so torch's
own CPU tensors cannot promise that. A mapping's pages are zero-filled by the system at their first
touch.
"""

from __future__ import annotations

import mmap
from typing import NamedTuple

import torch
from torch import Tensor

from rollout.errors import ConfigError


class Mapping(NamedTuple):
    """A mapping and the flat uint8 tensor over it; unmapped when the last tensor on it is gone."""

    region: mmap.mmap
    tensor: Tensor


def map_bytes(name: str, num_bytes: int) -> Mapping:
    """A new zero-filled mapping. Raises ConfigError, naming the buffer, if it is refused."""
    try:
        # Not the default MAP_SHARED: its pages survive MADV_DONTNEED.
        region = mmap.mmap(-1, max(num_bytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError, MemoryError) as error:
        raise ConfigError(
            f"no {num_bytes} bytes to be had for buffer {name!r} ({error}); lower buffer_size_gb"
        ) from error
    return Mapping(region, torch.frombuffer(region, dtype=torch.uint8)[:num_bytes])


def give_back_pages(region: mmap.mmap, start: int, end: int) -> int:
    """Free the whole pages in bytes [start, end); they then read as zero. Returns bytes freed."""
    first = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
    last = end // mmap.PAGESIZE * mmap.PAGESIZE if end < len(region) else end
    if last <= first:
        return 0
    region.madvise(mmap.MADV_DONTNEED, first, last - first)
    return last - first
