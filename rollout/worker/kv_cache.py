"""KVCache: the tensors that hold K and V, one per layer, in one buffer of memory.

Used by `rollout.worker.model_runner` for steps, and by `rollout.worker.worker` to release and
restore memory. Made by `rollout.worker.loading`. `rollout.cli.engine_facts` calls
`bytes_per_block`. All layers of a block are contiguous, so that moving a block is one copy in any
layout.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rollout.backends.base import AttentionBackend, Backend, CacheSpec
from rollout.backends.buffers import Strips
from rollout.backends.cpu.residency import resident_bytes
from rollout.config import GIB
from rollout.errors import ConfigError

BlockIds = Sequence[int] | NDArray[np.integer]

_BUFFER = "kv_cache"
MAX_COPIED_BYTES = 256 << 20  # size of the temporary through which whole blocks are copied


class KVCache:
    """K and V of `num_blocks` blocks with ids 1 .. num_blocks, and of the scratch block 0.

    The order of calls is [offload] -> release -> restore -> [onload]. Calls in brackets are
    optional. `release` discards blocks that were not offloaded. Each call may be repeated after an
    exception."""

    def __init__(self, backend: Backend, spec: CacheSpec, num_blocks: int) -> None:
        self._memory = backend.memory
        self._arena = backend.create_host_arena()
        self._spec = spec
        self._shape = backend.attention.cache_shape(spec, num_blocks + NUM_SCRATCH_BLOCKS)
        self._strips = strips_of(backend.attention, spec)
        self._copy_tokens = backend.copy_tokens
        self.num_blocks = num_blocks
        self.bytes_per_block = bytes_per_block(backend.attention, spec)
        self._buffer: Tensor | None = None
        # One tensor per layer in the attention backend's layout; other tensors after each restore,
        # and none while released.
        self.layers: tuple[Tensor, ...] = ()
        self._is_released = False
        self._arena_index: dict[int, int] = {}  # block id -> its place in the arena, in blocks
        self._move = copy_runs
        self._carve(self._memory.allocate(_BUFFER, self.num_bytes))

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole cache, including the scratch block."""
        return (self.num_blocks + NUM_SCRATCH_BLOCKS) * self.bytes_per_block

    @property
    def is_resident(self) -> bool:
        """Whether the tensors exist: False between `release` and `restore`."""
        return bool(self.layers)

    @property
    def num_resident_bytes(self) -> int:
        """Bytes of the cache that take physical memory now; 0 while released. On a CPU these are
        the pages that were written to, on a device all bytes."""
        return 0 if self._buffer is None else resident_bytes(self._buffer)

    @property
    def num_offloaded_bytes(self) -> int:
        """Bytes of the offloaded blocks in host memory."""
        return len(self._arena_index) * self.bytes_per_block

    @property
    def offloaded_blocks(self) -> list[int]:
        """Ids of the offloaded blocks in host memory."""
        return list(self._arena_index)

    def data_ptrs(self) -> dict[str, int]:
        """Return the address of each layer's tensor by name, or {} while released."""
        return {f"kv_cache.{index}": layer.data_ptr() for index, layer in enumerate(self.layers)}

    def release(self) -> int:
        """Release the memory and its contents. Returns the bytes released, or 0 for a second
        call."""
        if self._is_released:
            return 0
        self.layers, self._buffer = (), None
        num_bytes = self._memory.release(_BUFFER)
        self._is_released = True
        return num_bytes

    def restore(self) -> int:
        """Reserve the memory again, with undefined contents. Returns its bytes, or 0 if not
        released."""
        if self.layers:
            return 0
        self._carve(self._memory.restore(_BUFFER))
        self._is_released = False
        return self.num_bytes

    def offload(self, block_ids: BlockIds) -> int:
        """Copy these blocks to host memory, replacing earlier copies. Returns the bytes copied."""
        self._arena_index = {}  # until all are copied
        buffer = self._arena.reserve(len(block_ids) * self.bytes_per_block)
        index = {int(block): place for place, block in enumerate(block_ids)}
        assert len(index) == len(block_ids), "a block is named twice"
        self._move(self._in_blocks(buffer), range(len(block_ids)), self._pool, block_ids)
        self._arena_index = index
        return buffer.numel()

    def onload(self, block_ids: BlockIds) -> int:
        """Copy offloaded blocks back into place, and drop the host copies. Returns the bytes
        copied."""
        if len(block_ids) == 0:
            return 0
        ordered = sorted(block_ids, key=self._arena_index.__getitem__)
        places = [self._arena_index[block] for block in ordered]
        arena = self._arena.reserve((places[-1] + 1) * self.bytes_per_block)
        self._move(self._pool, ordered, self._in_blocks(arena), places)
        for block in ordered:
            del self._arena_index[block]
        return len(ordered) * self.bytes_per_block

    def discard(self, block_ids: BlockIds) -> int:
        """Drop the host copies of offloaded blocks. Returns the bytes freed. Only whole pages are
        freed. The rest is freed when the last block is dropped."""
        num_freed = 0
        for block in block_ids:
            start = self._arena_index.pop(block) * self.bytes_per_block
            num_freed += self._arena.discard(start, start + self.bytes_per_block)
        if not self._arena_index:
            self._arena.release()
        return num_freed

    def copy_tokens(self, sources: BlockIds, targets: BlockIds, lengths: BlockIds) -> None:
        """Copy the first `lengths[i]` tokens of block `sources[i]` to block `targets[i]`, in all
        layers. No block may be both a source and a target. Later tokens of a target block are then
        undefined."""
        ids_3K = torch.from_numpy(np.array([sources, targets, lengths], dtype=np.int64))
        if self._pool.is_cuda:
            ids_3K = ids_3K.pin_memory()  # else the host would wait for the step before
        source_K, target_K, length_K = ids_3K.to(self._pool.device, non_blocking=True)
        if self._copy_tokens is not None:
            self._copy_tokens(self._pool, source_K, target_K, length_K, self._strips)
            return
        # Copy whole blocks, in parts that bound the size of the temporary.
        count = max(1, MAX_COPIED_BYTES // self.bytes_per_block)
        for source_P, target_P in zip(source_K.split(count), target_K.split(count), strict=True):
            self._pool.index_copy_(0, target_P, self._pool.index_select(0, source_P))

    @property
    def _pool(self) -> Tensor:
        """The whole cache as [blocks, bytes]."""
        assert self._buffer is not None, "the KV cache is released"
        return self._in_blocks(self._buffer)

    def _in_blocks(self, buffer: Tensor) -> Tensor:
        return buffer.view(-1, self.bytes_per_block)

    def _carve(self, buffer: Tensor) -> None:
        self._buffer = buffer
        blocks = buffer.view(self._spec.dtype).view(self._shape[0], -1, *self._shape[1:])
        self.layers = blocks.unbind(1)


def copy_runs(targets: Tensor, target_ids: BlockIds, sources: Tensor, source_ids: BlockIds) -> None:
    """Copy sources[source_ids] to targets[target_ids], with one copy per run of consecutive ids.
    Returns when all bytes have arrived, also if one of the tensors is on a device."""
    if len(target_ids) == 0:
        return
    moves = np.diff(np.stack([np.asarray(target_ids), np.asarray(source_ids)]), axis=1)
    edges = [0, *(np.flatnonzero((moves != 1).any(axis=0)) + 1).tolist(), len(target_ids)]
    for start, end in pairwise(edges):
        to, source = int(target_ids[start]), int(source_ids[start])
        count = end - start
        targets[to : to + count].copy_(sources[source : source + count], non_blocking=True)
    for device_bytes in (targets, sources):
        device_bytes[:1, :1].cpu()  # waits for the copies queued on the device; free on a CPU


NUM_SCRATCH_BLOCKS = 1  # block 0, which the padding of a step writes to


def bytes_per_block(attention: AttentionBackend, spec: CacheSpec) -> int:
    """Return the bytes of one block over all layers, in the layout of `attention`."""
    return math.prod(attention.cache_shape(spec, 1)) * spec.dtype.itemsize * spec.num_layers


def strips_of(attention: AttentionBackend, spec: CacheSpec) -> Strips:
    """Return how a block's bytes divide into strips of tokens, in the layout of `attention`."""
    _, *shape = attention.cache_shape(spec, 1)
    _, *longer = attention.cache_shape(replace(spec, block_size=2 * spec.block_size), 1)
    token_dim = next(dim for dim, size in enumerate(shape) if size != longer[dim])
    return Strips(
        num_strips=spec.num_layers * math.prod(shape[:token_dim]),
        num_tokens=spec.block_size,
        bytes_per_token=math.prod(shape[token_dim + 1 :]) * spec.dtype.itemsize,
    )


def num_blocks_in(attention: AttentionBackend, spec: CacheSpec, buffer_size_gb: float) -> int:
    """Return how many whole blocks fit in `buffer_size_gb` GiB. The scratch block is not
    subtracted. Raises ConfigError if no block fits."""
    per_block = bytes_per_block(attention, spec)
    num_blocks = int(buffer_size_gb * GIB) // per_block
    if num_blocks < 1:
        raise ConfigError(
            f"buffer_size_gb={buffer_size_gb} holds no block of {per_block} bytes; "
            f"use at least {per_block / GIB:.3g}, or lower block_size_tokens={spec.block_size}"
        )
    return num_blocks
