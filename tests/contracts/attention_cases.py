"""Ragged batches for the attention contract, as a model would pass them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rollout.backends.base import AttentionBackend, CacheSpec
from rollout.backends.forward_batch import PLAIN, AttentionTraits, ForwardBatch, Rotation


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """`num_cached` tokens are in the cache already, `num_new` are computed; K and V span both."""

    num_cached: int
    num_new: int
    blocks: tuple[int, ...]


def make_spec(
    *,
    block_size: int = 16,
    num_kv_heads: int = 2,
    head_dim: int = 16,
    num_layers: int = 1,
    dtype: torch.dtype = torch.float32,
    value_dim: int | None = None,
) -> CacheSpec:
    return CacheSpec(
        num_layers=num_layers,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        dtype=dtype,
        block_size=block_size,
        value_dim=value_dim,
    )


def make_cache(attention: AttentionBackend, spec: CacheSpec, num_blocks: int) -> list[Tensor]:
    """Return new caches filled with NaN, so that a read beyond a context shows."""
    shape = attention.cache_shape(spec, num_blocks)
    return [torch.full(shape, torch.nan, dtype=spec.dtype) for _ in range(spec.num_layers)]


def make_batch(rows: Sequence[Row], kv: Sequence[Tensor], block_size: int) -> ForwardBatch:
    """Return a batch of these rows; decode rows (one new token, some cached) must come first."""
    is_decode = [row.num_new == 1 and row.num_cached > 0 for row in rows]
    assert sorted(is_decode, reverse=True) == is_decode
    positions = [np.arange(row.num_cached, row.num_cached + row.num_new) for row in rows]
    slots = [
        np.array(row.blocks)[p // block_size] * block_size + p % block_size
        for row, p in zip(rows, positions, strict=True)
    ]
    tables = np.zeros((len(rows), max(len(row.blocks) for row in rows) + 1), dtype=np.int32)
    for index, row in enumerate(rows):
        tables[index, : len(row.blocks)] = row.blocks
    num_new = [row.num_new for row in rows]
    query_starts = np.cumsum([0, *num_new], dtype=np.int32)
    context_lens = np.array([row.num_cached + row.num_new for row in rows], dtype=np.int32)
    return ForwardBatch(
        token_ids_T=torch.zeros(sum(num_new), dtype=torch.int64),
        positions_T=torch.from_numpy(np.concatenate(positions)),
        slots_T=torch.from_numpy(np.concatenate(slots)),
        block_tables_RM=torch.from_numpy(tables),
        query_starts_E=torch.from_numpy(query_starts),
        context_lens_R=torch.from_numpy(context_lens),
        query_starts=query_starts,
        context_lens=context_lens,
        num_decode_rows=sum(is_decode),
        block_size=block_size,
        logit_indices_L=torch.zeros(0, dtype=torch.int64),
        kv=kv,
    )


def attend(
    attention: AttentionBackend,
    q_THD: Tensor,
    k_TGD: Tensor,
    v_TGD: Tensor,
    batch: ForwardBatch,
    rotation: Rotation | None = None,
    traits: AttentionTraits = PLAIN,
) -> Tensor:
    """Call the attention of layer 0 as a forward pass does."""
    return attention.attend(q_THD, k_TGD, v_TGD, 0, attention.begin(batch), rotation, traits)


def causal_attention(
    q_CHD: Tensor, k_CGD: Tensor, v_CGD: Tensor, traits: AttentionTraits = PLAIN
) -> Tensor:
    """Return softmax(q k / sqrt(D)) v of a whole sequence over itself, in float64."""
    repeats = q_CHD.shape[1] // k_CGD.shape[1]
    k_CHD = k_CGD.double().repeat_interleave(repeats, dim=1)
    v_CHD = v_CGD.double().repeat_interleave(repeats, dim=1)
    scale = q_CHD.shape[2] ** -0.5 if traits.scale is None else traits.scale
    scores_HQC = torch.einsum("qhd,chd->hqc", q_CHD.double(), k_CHD) * scale
    if traits.softcap is not None:
        scores_HQC = traits.softcap * (scores_HQC / traits.softcap).tanh()
    hidden_QC = torch.ones(scores_HQC.shape[1:], dtype=torch.bool).triu(1)
    if traits.window is not None:
        hidden_QC |= torch.ones_like(hidden_QC).tril(-traits.window)
    scores_HQC = scores_HQC.masked_fill(hidden_QC, -torch.inf)
    log_total_HQ = scores_HQC.logsumexp(-1)
    if traits.sinks_H is not None:
        log_total_HQ = torch.logaddexp(log_total_HQ, traits.sinks_H.double()[:, None])
    weights_HQC = (scores_HQC - log_total_HQ[:, :, None]).exp()
    return torch.einsum("hqc,chd->qhd", weights_HQC, v_CHD)
