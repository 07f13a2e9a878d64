"""TokenMajorCache: the cache layout [block, offset, K or V, KV head, D].

Writing a token touches two runs of G * D numbers, or one where there is K alone. Blocks may lie
apart: only the dims within a block are contiguous. Shape letters: T tokens, H query heads, G
key/value heads, D head dim.
"""

from __future__ import annotations

from typing import Any, TypeAlias

from torch import Tensor

from rollout.backends.base import CacheSpec, Ops
from rollout.backends.forward_batch import ForwardBatch, Rotation
from rollout.backends.ops.reference import ReferenceOps

Places: TypeAlias = tuple[Tensor, Tensor]  # (block, offset in it) of each token


class TokenMajorCache:
    """The layout half of `AttentionBackend`; subclasses add `attend`."""

    def __init__(self, ops: Ops[Any] | None = None) -> None:
        """`ops` norms and rotates heads; None for the reference."""
        self._ops = ops or ReferenceOps()

    def rotate(
        self, q_THD: Tensor, k_TGD: Tensor, rotation: Rotation | None
    ) -> tuple[Tensor, Tensor]:
        """Query and key heads as they enter the products; their own memory is not changed."""
        if rotation is None:
            return q_THD, k_TGD
        ops, first = self._ops, rotation.rounds_norm_first
        if rotation.q_norm_D is not None:
            q_THD = ops.rms_norm(q_THD, rotation.q_norm_D, rotation.eps, rounds_first=first)
        if rotation.k_norm_D is not None:
            k_TGD = ops.rms_norm(k_TGD, rotation.k_norm_D, rotation.eps, rounds_first=first)
        return ops.rotary(q_THD, k_TGD, rotation.cos_TD, rotation.sin_TD, rotation.rounding)

    def cache_shape(self, spec: CacheSpec, num_blocks: int) -> tuple[int, ...]:
        """[num_blocks, block_size, 2, G, D], or 1 in place of 2 where V is a part of K."""
        num_planes = 2 if spec.value_dim is None else 1
        return (num_blocks, spec.block_size, num_planes, spec.num_kv_heads, spec.head_dim)

    def begin(self, batch: ForwardBatch) -> ForwardBatch:
        """The batch as it is: layers share nothing."""
        return batch


def write_tokens(cache: Tensor, k_TGD: Tensor, v_TGD: Tensor, places: Places) -> None:
    """Store each token's K at its place, and its V unless that is a part of K."""
    blocks_T, offsets_T = places
    cache[blocks_T, offsets_T, 0] = k_TGD
    if cache.shape[2] == 2:
        cache[blocks_T, offsets_T, 1] = v_TGD


def places_of(batch: ForwardBatch) -> Places:
    """Where the batch's tokens are written."""
    return batch.slots_T // batch.block_size, batch.slots_T % batch.block_size
