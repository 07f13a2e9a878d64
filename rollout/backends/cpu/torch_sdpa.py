"""TorchSdpaAttention: torch's fused attention over blocks, one call per row.

Nothing is padded and no batch is copied: a row within one block is read where it lies, any other
row is gathered by itself. Query heads that share a KV head are handed to
torch as extra query positions (decode) or as heads over an expanded view (prefill), so K and V are
never repeated in memory. Shape letters: T tokens, Q tokens of one row, C context, H query heads, G
key/value heads, E query heads per KV head, D head dim.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from rollout.backends.cpu.token_major import (
    Places,
    TokenMajorCache,
    places_of,
    write_tokens,
)
from rollout.backends.forward_batch import PLAIN, AttentionTraits, ForwardBatch, Rotation


class Row(NamedTuple):
    """Tokens [start, end) of a row, the last ones of its context, and the blocks of that."""

    start: int
    end: int
    context_len: int
    first_block: int
    blocks: Tensor


class TorchPlan:
    """What all layers of a forward pass share, worked out when the first of them needs it."""

    def __init__(self, batch: ForwardBatch) -> None:
        self.batch = batch

    @cached_property
    def places(self) -> Places:
        """Where the tokens are written."""
        return places_of(self.batch)

    @cached_property
    def rows(self) -> list[Row]:
        """The rows of the batch, in order."""
        batch, tables_RM = self.batch, self.batch.block_tables_RM
        spans, lengths = pairwise(batch.query_starts.tolist()), batch.context_lens.tolist()
        columns = spans, lengths, tables_RM[:, 0].tolist(), tables_RM
        return [
            Row(start, end, length, first_block, blocks_M[: -(-length // batch.block_size)])
            for (start, end), length, first_block, blocks_M in zip(*columns, strict=True)
        ]


class TorchSdpaAttention(TokenMajorCache):
    """Implements `AttentionBackend` with torch.nn.functional.scaled_dot_product_attention."""

    def begin(self, batch: ForwardBatch) -> ForwardBatch:
        """The batch with a TorchPlan."""
        return replace(batch, plan=TorchPlan(batch))

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
        """Write K and V at their slots, then attend causally; [T, H, D]."""
        q_THD, k_TGD = self.rotate(q_THD, k_TGD, rotation)
        cache, plan, num_dims = batch.kv[layer], batch.plan, v_TGD.shape[2]
        write_tokens(cache, k_TGD, v_TGD, plan.places)
        if cache.shape[2] == 1:
            v_TGD = k_TGD  # equal dims spare torch the slow path; the surplus ones are cut off
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


def _context(cache: Tensor, row: Row, first: int) -> tuple[Tensor, Tensor]:
    """K and V of the row's positions from `first` on, [C, G, D]; both K where V is a part of it."""
    block_size, skipped = cache.shape[1], 0
    if row.context_len <= block_size:
        context = cache[row.first_block]
    else:
        skipped = first - first % block_size
        context = cache[row.blocks[skipped // block_size :]].flatten(0, 1)
    context = context[first - skipped : row.context_len - skipped]
    return context[:, 0], context[:, -1]


def _causal(q_QHD: Tensor, k_QGD: Tensor, v_QGD: Tensor, scale: float) -> Tensor:
    """Attention of a whole prompt to itself."""
    q_GEQD, k_GEQD, v_GEQD = _group(q_QHD, k_QGD, v_QGD)
    out_GEQD = F.scaled_dot_product_attention(q_GEQD, k_GEQD, v_GEQD, is_causal=True, scale=scale)
    return out_GEQD.flatten(0, 1).transpose(0, 1)


def _with_context(q_QHD: Tensor, k_CGD: Tensor, v_CGD: Tensor, scale: float) -> Tensor:
    """Attention of the last Q tokens of a context to all of it."""
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
    """The same with windows, softcaps and sinks, by one explicit softmax in float32."""
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
    """Heads first, query heads grouped under their KV head; K and V are expanded views."""
    num_groups = k_CGD.shape[1]
    num_queries, num_heads, head_dim = q_QHD.shape
    q_QGED = q_QHD.view(num_queries, num_groups, num_heads // num_groups, head_dim)
    q_GEQD = q_QGED.permute(1, 2, 0, 3)
    shape = (-1, q_GEQD.shape[1], -1, -1)
    k_GECD = k_CGD.transpose(0, 1).unsqueeze(1).expand(shape)
    v_GECD = v_CGD.transpose(0, 1).unsqueeze(1).expand(shape)
    return q_GEQD, k_GECD, v_GECD
