"""What torch.nn.attention.varlen.varlen_attn documents of a paged cache, in plain torch.

It refuses what FlashAttention 2 refuses on a device, and what it would compute wrongly there.
Shape letters: T tokens, R rows, E = R + 1, H query heads, G key/value heads, D head dim, P pages, O
offsets in a page, M pages per table, Q tokens of a row, C its context.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from rollout.backends.attention.torch_flash import PagedVarlen, TorchFlashAttention
from rollout.backends.base import Ops


def plain_varlen(
    query_THD: Tensor,
    key_POGD: Tensor,
    value_POGD: Tensor,
    cu_seq_q_E: Tensor,
    cu_seq_k_E: Tensor,
    max_q: int,
    max_k: int,
    *,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
    seqused_k: Tensor,
    block_table: Tensor,
    num_splits: int | None = None,
) -> Tensor:
    """[T, H, D]; NaN where no row has a token."""
    num_heads, num_kv_heads = query_THD.shape[1], key_POGD.shape[2]
    num_rows = len(cu_seq_q_E) - 1
    for numbers in (cu_seq_q_E, cu_seq_k_E, seqused_k, block_table):
        assert numbers.dtype == torch.int32
    assert cu_seq_q_E.is_contiguous()
    assert cu_seq_k_E.is_contiguous()
    assert seqused_k.is_contiguous()
    assert block_table.stride(-1) == 1
    assert cu_seq_k_E.shape == cu_seq_q_E.shape
    assert seqused_k.shape == block_table.shape[:1] == (num_rows,)
    assert query_THD.stride(-1) == key_POGD.stride(-1) == value_POGD.stride(-1) == 1
    assert query_THD.dtype == key_POGD.dtype == value_POGD.dtype
    assert enable_gqa or num_heads == num_kv_heads
    assert num_splits == 1, "more are wrong where K and V are paged"
    if max_q == 1 and window_size == (-1, -1):
        assert len(query_THD) == num_rows, "query heads that share a KV head become rows"
    lengths, starts = seqused_k.tolist(), cu_seq_q_E.tolist()
    assert torch.equal(cu_seq_k_E.diff(), seqused_k)
    out_THD = torch.full_like(query_THD, torch.nan)
    for row, (start, end) in enumerate(pairwise(starts)):
        assert end - start <= max_q
        assert lengths[row] <= max_k
        num_pages = -(-lengths[row] // key_POGD.shape[1])
        pages = block_table[row, :num_pages].long()
        k_CGD, v_CGD = (x[pages].flatten(0, 1)[: lengths[row]] for x in (key_POGD, value_POGD))
        visible_QC = _visible(end - start, lengths[row], window_size)
        out_THD[start:end] = _attend(query_THD[start:end], k_CGD, v_CGD, visible_QC, scale)
    return out_THD


def _visible(num_queries: int, context_len: int, window: tuple[int, int]) -> Tensor:
    """[Q, C]: the last query is at the last position; -1 is no bound."""
    at_Q1 = torch.arange(context_len - num_queries, context_len)[:, None]
    distance_QC = torch.arange(context_len)[None, :] - at_Q1
    visible_QC = torch.ones_like(distance_QC, dtype=torch.bool)
    if window[0] >= 0:
        visible_QC &= distance_QC >= -window[0]
    if window[1] >= 0:
        visible_QC &= distance_QC <= window[1]
    return visible_QC


def _attend(
    q_QHD: Tensor, k_CGD: Tensor, v_CGD: Tensor, visible_QC: Tensor, scale: float | None
) -> Tensor:
    repeats = q_QHD.shape[1] // k_CGD.shape[1]
    k_CHD, v_CHD = (x.float().repeat_interleave(repeats, dim=1) for x in (k_CGD, v_CGD))
    scores_HQC = torch.einsum("qhd,chd->hqc", q_QHD.float(), k_CHD)
    scores_HQC *= q_QHD.shape[2] ** -0.5 if scale is None else scale
    weights_HQC = scores_HQC.masked_fill(~visible_QC, -torch.inf).softmax(-1)
    return torch.einsum("hqc,chd->qhd", weights_HQC, v_CHD).to(q_QHD.dtype)


def plain_flash(ops: Ops | None = None) -> TorchFlashAttention:
    """The backend over `plain_varlen`, which also takes float32 and small pages."""
    varlen = PagedVarlen(
        attend=plain_varlen,
        dtypes=(torch.float32, torch.bfloat16),
        page_tokens=1,
        max_head_dim=256,
    )
    return TorchFlashAttention(ops, varlen)
