"""TokenMajorCache: the cache layout [block, offset, K or V, KV head, D], and moving blocks in it.

Slot s (block * block_size + offset) is row s of the cache seen as [slots, 2, G, D]. A row whose
blocks follow each other in the pool is therefore one strided view, and writing a token touches two
runs of G * D numbers. Shape letters: T tokens, H query heads, G key/value heads, D head dim, B
blocks, L layers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np
from torch import Tensor

from rollout.backends.base import CacheSpec, Ops
from rollout.backends.forward_batch import Rotation
from rollout.backends.ops.reference import ReferenceOps


class TokenMajorCache:
    """The layout half of `AttentionBackend`; subclasses add `attend`."""

    def __init__(self, ops: Ops | None = None) -> None:
        """`ops` norms and rotates heads; None for the reference."""
        self._ops = ops or ReferenceOps()

    def rotate(
        self, q_THD: Tensor, k_TGD: Tensor, rotation: Rotation | None
    ) -> tuple[Tensor, Tensor]:
        """Query and key heads as they enter the products; their own memory is not changed."""
        if rotation is None:
            return q_THD, k_TGD
        if rotation.q_norm_D is not None:
            q_THD = self._ops.rms_norm(q_THD, rotation.q_norm_D, rotation.eps)
        if rotation.k_norm_D is not None:
            k_TGD = self._ops.rms_norm(k_TGD, rotation.k_norm_D, rotation.eps)
        return self._ops.rotary(q_THD, k_TGD, rotation.cos_TD, rotation.sin_TD)

    def cache_shape(self, spec: CacheSpec, num_blocks: int) -> tuple[int, ...]:
        """[num_blocks, block_size, 2, G, D]."""
        return (num_blocks, spec.block_size, 2, spec.num_kv_heads, spec.head_dim)

    def copy_blocks(self, kv: Sequence[Tensor], sources: Tensor, targets: Tensor) -> None:
        """Copy whole blocks, in every layer; all sources are read before any target is written."""
        targets = targets.long()
        for layer in kv:
            layer.index_copy_(0, targets, layer.index_select(0, sources))

    def gather_blocks(self, kv: Sequence[Tensor], blocks: Tensor, out: Tensor) -> None:
        """Copy `blocks` into the flat uint8 tensor `out`: [B, L, block_size, 2, G, D], by block."""
        out_BL = out.view(kv[0].dtype).view(len(blocks), len(kv), *kv[0].shape[1:])
        for start, end, block in runs(blocks):
            for index, layer in enumerate(kv):
                out_BL[start:end, index].copy_(layer[block : block + end - start])

    def scatter_blocks(self, kv: Sequence[Tensor], blocks: Tensor, source: Tensor) -> None:
        """Inverse of `gather_blocks`."""
        source_BL = source.view(kv[0].dtype).view(len(blocks), len(kv), *kv[0].shape[1:])
        for start, end, block in runs(blocks):
            for index, layer in enumerate(kv):
                layer[block : block + end - start].copy_(source_BL[start:end, index])


def write_tokens(cache: Tensor, k_TGD: Tensor, v_TGD: Tensor, slots_T: Tensor) -> Tensor:
    """Store each token's K and V at its slot. Returns the cache seen as [slots, 2, G, D]."""
    slots_S2GD = cache.view(-1, *cache.shape[2:])
    slots_S2GD[:, 0].index_copy_(0, slots_T, k_TGD)
    slots_S2GD[:, 1].index_copy_(0, slots_T, v_TGD)
    return slots_S2GD


def runs(blocks: Tensor) -> Iterator[tuple[int, int, int]]:
    """(start, end, first block) of each run of consecutive block ids."""
    ids = blocks.cpu().numpy()
    if len(ids) == 0:
        return
    edges = [0, *(np.flatnonzero(np.diff(ids) != 1) + 1).tolist(), len(ids)]
    for start, end in pairwise(edges):
        yield start, end, int(ids[start])
