"""From bytes to blocks. A block holds the K and V of `block_size` tokens in every layer."""

from __future__ import annotations

import math
from dataclasses import replace

from rollout.backends.base import AttentionBackend, CacheSpec
from rollout.backends.buffers import Strips
from rollout.errors import ConfigError

GIB = 2**30
NUM_SCRATCH_BLOCKS = 1  # block 0, which the padding of a step writes to


def bytes_per_block(attention: AttentionBackend, spec: CacheSpec) -> int:
    """Return the bytes of one block over all layers, in the layout of `attention`."""
    return math.prod(attention.cache_shape(spec, 1)) * spec.dtype.itemsize * spec.num_layers


def strips_of(attention: AttentionBackend, spec: CacheSpec) -> Strips:
    """Return where the tokens of a block lie, in the layout of `attention`."""
    _, *shape = attention.cache_shape(spec, 1)
    _, *longer = attention.cache_shape(replace(spec, block_size=2 * spec.block_size), 1)
    token_dim = next(dim for dim, size in enumerate(shape) if size != longer[dim])
    return Strips(
        num_strips=spec.num_layers * math.prod(shape[:token_dim]),
        num_tokens=spec.block_size,
        bytes_per_token=math.prod(shape[token_dim + 1 :]) * spec.dtype.itemsize,
    )


def num_blocks_in(attention: AttentionBackend, spec: CacheSpec, buffer_size_gb: float) -> int:
    """Return how many whole blocks fit `buffer_size_gb` GiB, the scratch block not counted.

    Raises ConfigError if not even one fits.
    """
    per_block = bytes_per_block(attention, spec)
    num_blocks = int(buffer_size_gb * GIB) // per_block
    if num_blocks < 1:
        raise ConfigError(
            f"buffer_size_gb={buffer_size_gb} holds no block of {per_block} bytes; "
            f"use at least {per_block / GIB:.3g}, or lower block_size_tokens={spec.block_size}"
        )
    return num_blocks
