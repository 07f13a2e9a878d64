"""TorchSdpaAttention: attention on a CPU by torch, row by row, without compiled kernels.

Used by `rollout.backends.cpu.backend`. NativePagedAttention of `rollout.backends.cpu.attention`
inherits the cache layout, and uses this class for dtypes and head dims that the kernels do not
support. Writes only the KV cache.

The cache is [block, offset, K or V, KV head, D]. A token's K and V are each G * D contiguous
numbers. If V is a part of K (MLA), only K is stored. There can be gaps between blocks. Nothing is
padded. A context in one block is read in place, and any other is gathered. Shape letters: T tokens,
Q tokens of one row, C context, H query heads, G key/value heads, E query heads per KV head, D head
dim.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from rollout.backends.base import CacheSpec, Ops
from rollout.backends.forward_batch import PLAIN, AttentionTraits, ForwardBatch, Rotation
from rollout.backends.ops.reference import ReferenceOps

Places: TypeAlias = tuple[Tensor, Tensor]  # block of each token, and offset within the block


class Row(NamedTuple):
    """A row of the batch, with the batch's tokens [start, end). These are the last tokens of a
    context of `context_len` tokens, whose K and V are in `blocks`."""

    start: int
    end: int
    context_len: int
    first_block: int
    blocks: Tensor


class TorchPlan:
    """Values that all layers of a forward pass share, computed at first use."""

    def __init__(self, batch: ForwardBatch) -> None:
        self.batch = batch

    @cached_property
    def places(self) -> Places:
        """Block and offset at which each token's K and V are written."""
        return places_of(self.batch)

    @cached_property
    def rows(self) -> list[Row]:
        batch, tables_RM = self.batch, self.batch.block_tables_RM
        spans, lengths = pairwise(batch.query_starts.tolist()), batch.context_lens.tolist()
        columns = spans, lengths, tables_RM[:, 0].tolist(), tables_RM
        return [
            Row(start, end, length, first_block, blocks_M[: -(-length // batch.block_size)])
            for (start, end), length, first_block, blocks_M in zip(*columns, strict=True)
        ]


class TorchSdpaAttention:
    """`AttentionBackend` with torch.nn.functional.scaled_dot_product_attention."""

    def __init__(self, ops: Ops[Any] | None = None) -> None:
        """`ops` has the operations that norm and rotate query and key heads; None means
        ReferenceOps."""
        self._ops = ops or ReferenceOps()

    def cache_shape(self, spec: CacheSpec, num_blocks: int) -> tuple[int, ...]:
        """Return [num_blocks, block_size, 2, G, D], with 1 in place of 2 if V is a part of K."""
        num_planes = 2 if spec.value_dim is None else 1
        return (num_blocks, spec.block_size, num_planes, spec.num_kv_heads, spec.head_dim)

    def begin(self, batch: ForwardBatch) -> ForwardBatch:
        """Return the batch with a new TorchPlan as its `plan`."""
        return replace(batch, plan=TorchPlan(batch))

    def rotate(
        self, q_THD: Tensor, k_TGD: Tensor, rotation: Rotation | None
    ) -> tuple[Tensor, Tensor]:
        """Return query and key heads, normed and rotated as `rotation` says. Return them unchanged
        if `rotation` is None. The arguments are not written."""
        if rotation is None:
            return q_THD, k_TGD
        ops, first = self._ops, rotation.rounds_norm_first
        if rotation.q_norm_D is not None:
            q_THD = ops.rms_norm(q_THD, rotation.q_norm_D, rotation.eps, rounds_first=first)
        if rotation.k_norm_D is not None:
            k_TGD = ops.rms_norm(k_TGD, rotation.k_norm_D, rotation.eps, rounds_first=first)
        return ops.rotary(q_THD, k_TGD, rotation.cos_TD, rotation.sin_TD, rotation.rounding)

    def attend(
        self,
        q_THD: Tensor,
        k_TGD: Tensor,
        v_TGD: Tensor,
        layer: int,
        batch: ForwardBatch,
        rotation: Rotation | None = None,
        traits: AttentionTraits = PLAIN,
    ) -> Tensor:
        """Norm and rotate Q and K, write K and V, and attend causally. Return [T, H, D]."""
        q_THD, k_TGD = self.rotate(q_THD, k_TGD, rotation)
        cache, plan, num_dims = batch.kv[layer], batch.plan, v_TGD.shape[2]
        write_tokens(cache, k_TGD, v_TGD, plan.places)
        if cache.shape[2] == 1:
            v_TGD = k_TGD  # torch is slow if dims differ; the surplus dims are cut off below
        out_THD = q_THD.new_empty(*q_THD.shape[:2], num_dims)
        scale = traits.scale_of(q_THD.shape[2])
        for row in plan.rows:
            tokens = slice(row.start, row.end)
            num_queries, q_QHD = row.end - row.start, q_THD[tokens]
            if num_queries == row.context_len > 1 and traits.has_plain_scores:
                out_QHD = _causal(q_QHD, k_TGD[tokens], v_TGD[tokens], scale)
            else:
                first = 0
                if traits.window is not None:
                    first = max(0, row.context_len - num_queries - traits.window + 1)
                k_CGD, v_CGD = _context(cache, row, first)
                if traits.has_plain_scores:
                    out_QHD = _with_context(q_QHD, k_CGD, v_CGD, scale)
                else:
                    out_QHD = _explicit(q_QHD, k_CGD, v_CGD, scale, traits)
            out_THD[tokens] = out_QHD if out_QHD.shape[2] == num_dims else out_QHD[..., :num_dims]
        return out_THD


def places_of(batch: ForwardBatch) -> Places:
    """Return the blocks and the offsets at which the batch's tokens are written."""
    return batch.slots_T // batch.block_size, batch.slots_T % batch.block_size


def write_tokens(cache: Tensor, k_TGD: Tensor, v_TGD: Tensor, places: Places) -> None:
    """Store each token's K at its place in the cache, and its V unless V is a part of K."""
    blocks_T, offsets_T = places
    cache[blocks_T, offsets_T, 0] = k_TGD
    if cache.shape[2] == 2:
        cache[blocks_T, offsets_T, 1] = v_TGD


def _context(cache: Tensor, row: Row, first: int) -> tuple[Tensor, Tensor]:
    """Return K and V of the row's positions from `first` on, [C, G, D]. If V is a part of K, both
    are K."""
    block_size, skipped = cache.shape[1], 0
    if row.context_len <= block_size:
        context = cache[row.first_block]
    else:
        skipped = first - first % block_size
        context = cache[row.blocks[skipped // block_size :]].flatten(0, 1)
    context = context[first - skipped : row.context_len - skipped]
    return context[:, 0], context[:, -1]


def _causal(q_QHD: Tensor, k_QGD: Tensor, v_QGD: Tensor, scale: float) -> Tensor:
    """Return causal attention of a whole prompt to itself, [Q, H, D]."""
    q_GEQD, k_GEQD, v_GEQD = _group(q_QHD, k_QGD, v_QGD)
    out_GEQD = F.scaled_dot_product_attention(q_GEQD, k_GEQD, v_GEQD, is_causal=True, scale=scale)
    return out_GEQD.flatten(0, 1).transpose(0, 1)


def _with_context(q_QHD: Tensor, k_CGD: Tensor, v_CGD: Tensor, scale: float) -> Tensor:
    """Return causal attention of the last Q tokens of a context to the context, [Q, H, D]."""
    num_queries, num_heads, head_dim = q_QHD.shape
    num_kv_heads, context_len = k_CGD.shape[1], k_CGD.shape[0]
    if num_queries == 1:
        q_1GED = q_QHD.view(1, num_kv_heads, num_heads // num_kv_heads, head_dim)
        k_1GCD, v_1GCD = k_CGD.transpose(0, 1)[None], v_CGD.transpose(0, 1)[None]
        out_1GED = F.scaled_dot_product_attention(q_1GED, k_1GCD, v_1GCD, scale=scale)
        return out_1GED.reshape(1, num_heads, head_dim)
    visible_QC = torch.ones(num_queries, context_len, dtype=torch.bool, device=q_QHD.device).tril_(
        context_len - num_queries
    )
    q_GEQD, k_GECD, v_GECD = _group(q_QHD, k_CGD, v_CGD)
    out_GEQD = F.scaled_dot_product_attention(
        q_GEQD, k_GECD, v_GECD, attn_mask=visible_QC, scale=scale
    )
    return out_GEQD.flatten(0, 1).transpose(0, 1)


def _explicit(
    q_QHD: Tensor, k_CGD: Tensor, v_CGD: Tensor, scale: float, traits: AttentionTraits
) -> Tensor:
    """Return the same as `_with_context`, but with windows, softcaps and sinks, by a softmax in
    float32."""
    q_GEQD, k_GECD, v_GECD = _group(q_QHD, k_CGD, v_CGD)
    scores_GEQC = (q_GEQD.float() @ k_GECD.float().transpose(-1, -2)) * scale
    if traits.softcap is not None:
        scores_GEQC = (scores_GEQC / traits.softcap).tanh_() * traits.softcap
    num_queries, context_len = scores_GEQC.shape[-2:]
    last = context_len - num_queries
    visible_QC = torch.ones(num_queries, context_len, dtype=torch.bool, device=q_QHD.device)
    visible_QC = visible_QC.tril_(last)
    if traits.window is not None:
        visible_QC = visible_QC.triu_(last - traits.window + 1)
    scores_GEQC = scores_GEQC.masked_fill(~visible_QC, -torch.inf)
    if traits.sinks_H is not None:
        sinks_GE11 = traits.sinks_H.float().view(*scores_GEQC.shape[:2], 1, 1)
        sinks_GEQ1 = sinks_GE11.expand(-1, -1, num_queries, 1)
        scores_GEQC = torch.cat((scores_GEQC, sinks_GEQ1), dim=-1)
    weights_GEQC = scores_GEQC.softmax(-1)[..., :context_len]
    out_GEQD = (weights_GEQC @ v_GECD.float()).to(q_QHD.dtype)
    return out_GEQD.flatten(0, 1).transpose(0, 1)


def _group(q_QHD: Tensor, k_CGD: Tensor, v_CGD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return Q, K and V as [G, E, tokens, D], the query heads grouped by KV head. K and V are
    expanded views, which are never repeated in memory."""
    num_groups = k_CGD.shape[1]
    num_queries, num_heads, head_dim = q_QHD.shape
    q_QGED = q_QHD.view(num_queries, num_groups, num_heads // num_groups, head_dim)
    q_GEQD = q_QGED.permute(1, 2, 0, 3)
    shape = (-1, q_GEQD.shape[1], -1, -1)
    k_GECD = k_CGD.transpose(0, 1).unsqueeze(1).expand(shape)
    v_GECD = v_CGD.transpose(0, 1).unsqueeze(1).expand(shape)
    return q_GEQD, k_GECD, v_GECD
