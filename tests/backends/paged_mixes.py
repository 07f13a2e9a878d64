"""Batches as a captured graph would see them: padding rows and tokens, rows without tokens, garbage
wherever nothing may be read. Shape letters: T tokens, R rows, M blocks per table, B blocks, O
offsets in a block, G key/value heads, D head dim.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from rollout.backends.forward_batch import ForwardBatch

GARBAGE_BLOCK = 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class Mix:
    """Context lengths of decode rows, then padding rows, then (cached, new) of prefill rows."""

    decode: tuple[int, ...] = ()
    num_padding_rows: int = 0
    prefill: tuple[tuple[int, int], ...] = ()
    num_padding_tokens: int = 0
    is_decode_known: bool = True
    group_size: int = 1
    num_kv_heads: int = 1
    head_dim: int = 16
    block_size: int = 16
    seed: int = 0

    @property
    def rows(self) -> list[tuple[int, int]]:
        """(context length, tokens) of every row."""
        decode = [(context_len, 1) for context_len in self.decode]
        padding = [(1, 1)] * self.num_padding_rows
        return decode + padding + [(cached + new, new) for cached, new in self.prefill]

    @property
    def num_tokens(self) -> int:
        """Tokens of rows, without the padding after them."""
        return sum(new for _, new in self.rows)

    @property
    def real_tokens(self) -> Tensor:
        """Indices of the tokens whose output counts."""
        first, end = len(self.decode), len(self.decode) + self.num_padding_rows
        real = [t for t in range(self.num_tokens) if not first <= t < end]
        return torch.tensor(real, dtype=torch.int64)  # also if there are none


def projection(mix: Mix, num_tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return Q, K and V as views of one tensor."""
    sizes = [mix.group_size * mix.num_kv_heads, mix.num_kv_heads, mix.num_kv_heads]
    generator = torch.Generator().manual_seed(mix.seed)
    fused = torch.randn(num_tokens, sum(sizes), mix.head_dim, generator=generator)
    q, k, v = fused.split(sizes, dim=1)
    return q, k, v


def build(mix: Mix) -> ForwardBatch:
    """Return the batch without padding tokens; `kv` is random in contexts and NaN elsewhere."""
    generator = torch.Generator().manual_seed(mix.seed + 1)
    rows, first_padding = mix.rows, len(mix.decode)
    counts = [-(-context_len // mix.block_size) for context_len, _ in rows]
    ids = (torch.randperm(2 * sum(counts) + 1, generator=generator) + 1).tolist()
    tables = np.zeros((len(rows), max(counts) + 1), dtype=np.int32)
    shape = (len(ids) + 1, mix.block_size, 2, mix.num_kv_heads, mix.head_dim)
    cache = torch.full(shape, torch.nan)
    positions, slots = [], []
    for row, (context_len, new) in enumerate(rows):
        is_padding = first_padding <= row < first_padding + mix.num_padding_rows
        taken = [0] if is_padding else [ids.pop() for _ in range(counts[row])]
        tables[row, : counts[row]] = taken
        where = np.arange(context_len)
        slot = np.asarray(taken, dtype=np.int64)[where // mix.block_size] * mix.block_size
        slot += where % mix.block_size
        past = torch.from_numpy(slot[: context_len - new])
        values = torch.randn(len(past), *shape[2:], generator=generator)
        cache[past // mix.block_size, past % mix.block_size] = values
        positions.append(where[context_len - new :])
        slots.append(slot[context_len - new :])
    starts = np.cumsum([0, *(new for _, new in rows)], dtype=np.int32)
    lens = np.array([context_len for context_len, _ in rows], dtype=np.int32)
    return ForwardBatch(
        token_ids_T=torch.zeros(mix.num_tokens, dtype=torch.int64),
        positions_T=torch.from_numpy(np.concatenate(positions)),
        slots_T=torch.from_numpy(np.concatenate(slots)),
        block_tables_RM=torch.from_numpy(tables),
        query_starts_E=torch.from_numpy(starts),
        context_lens_R=torch.from_numpy(lens),
        query_starts=starts,
        context_lens=lens,
        num_decode_rows=first_padding + mix.num_padding_rows if mix.is_decode_known else 0,
        block_size=mix.block_size,
        logit_indices_L=torch.zeros(0, dtype=torch.int64),
        kv=[cache],
    )


def as_in_a_graph(batch: ForwardBatch, mix: Mix) -> ForwardBatch:
    """The same rows for the head-major layout, padded, with garbage in place of what is not to be
    read: host arrays, table entries beyond contexts. Blocks lie apart.
    """
    num_rows, num_blocks = batch.block_tables_RM.shape
    wide = torch.full((num_rows, num_blocks + 3), GARBAGE_BLOCK, dtype=torch.int32)
    for row, (context_len, _) in enumerate(mix.rows):
        count = -(-context_len // mix.block_size)
        wide[row, :count] = batch.block_tables_RM[row, :count]
    none = np.zeros(0, dtype=np.int32)
    cache_B2GOD = batch.kv[0].permute(0, 2, 3, 1, 4)
    padding = torch.zeros(mix.num_padding_tokens, dtype=torch.int64)
    return replace(
        batch,
        token_ids_T=torch.cat((batch.token_ids_T, padding)),
        positions_T=torch.cat((batch.positions_T, padding)),
        slots_T=torch.cat((batch.slots_T, padding)),
        block_tables_RM=wide[:, :num_blocks],
        query_starts=none,
        context_lens=none,
        kv=[torch.stack((cache_B2GOD, cache_B2GOD), dim=1)[:, 1]],
    )
