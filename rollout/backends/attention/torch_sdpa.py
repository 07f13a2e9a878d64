"""TorchSdpaAttention: torch's fused attention over blocks, one call per row.

Nothing is padded and no batch is copied: a row within one block is read where it lies, any other
row is gathered by itself. Query heads that share a KV head are handed to
torch as extra query positions (decode) or as heads over an expanded view (prefill), so K and V are
never repeated in memory. Shape letters: T tokens, Q tokens of one row, C context, H query heads, G
key/value heads, E query heads per KV head, D head dim.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from rollout.backends.attention.token_major import TokenMajorCache, write_tokens
from rollout.backends.forward_batch import ForwardBatch, Rotation


class TorchSdpaAttention(TokenMajorCache):
    """Implements `AttentionBackend` with torch.nn.functional.scaled_dot_product_attention."""

    def attend(
        self,
        q_THD: Tensor,
        k_TGD: Tensor,
        v_TGD: Tensor,
        layer: int,
        batch: ForwardBatch,
        rotation: Rotation | None = None,
    ) -> Tensor:
        """Write K and V at their slots, then attend causally; [T, H, D]."""
        q_THD, k_TGD = self.rotate(q_THD, k_TGD, rotation)
        cache = batch.kv[layer]
        write_tokens(cache, k_TGD, v_TGD, batch.slots_T)
        out_THD = torch.empty_like(q_THD)
        tables_RM = batch.block_tables_RM
        starts = batch.query_starts.tolist()
        for row, context_len in enumerate(batch.context_lens.tolist()):
            start, end = starts[row], starts[row + 1]
            q_QHD = q_THD[start:end]
            if end - start == context_len and context_len > 1:
                out_THD[start:end] = _causal(q_QHD, k_TGD[start:end], v_TGD[start:end])
                continue
            if context_len <= batch.block_size:
                context_B2GD = cache[int(tables_RM[row, 0])]
            else:
                num_blocks = -(-context_len // batch.block_size)
                context_B2GD = cache[tables_RM[row, :num_blocks]].flatten(0, 1)
            out_THD[start:end] = _with_context(q_QHD, context_B2GD[:context_len])
        return out_THD


def _causal(q_QHD: Tensor, k_QGD: Tensor, v_QGD: Tensor) -> Tensor:
    """Attention of a whole prompt to itself."""
    q_GEQD, k_GEQD, v_GEQD = _group(q_QHD, k_QGD, v_QGD)
    out_GEQD = F.scaled_dot_product_attention(q_GEQD, k_GEQD, v_GEQD, is_causal=True)
    return out_GEQD.flatten(0, 1).transpose(0, 1)


def _with_context(q_QHD: Tensor, context_C2GD: Tensor) -> Tensor:
    """Attention of the last Q tokens of a context to all of it."""
    num_queries, num_heads, head_dim = q_QHD.shape
    k_CGD, v_CGD = context_C2GD.unbind(1)
    num_kv_heads, context_len = k_CGD.shape[1], k_CGD.shape[0]
    if num_queries == 1:
        q_1GED = q_QHD.view(1, num_kv_heads, num_heads // num_kv_heads, head_dim)
        k_1GCD, v_1GCD = k_CGD.transpose(0, 1)[None], v_CGD.transpose(0, 1)[None]
        out_1GED = F.scaled_dot_product_attention(q_1GED, k_1GCD, v_1GCD)
        return out_1GED.reshape(1, num_heads, head_dim)
    visible_QC = torch.ones(num_queries, context_len, dtype=torch.bool, device=q_QHD.device).tril_(
        context_len - num_queries
    )
    q_GEQD, k_GECD, v_GECD = _group(q_QHD, k_CGD, v_CGD)
    out_GEQD = F.scaled_dot_product_attention(q_GEQD, k_GECD, v_GECD, attn_mask=visible_QC)
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
