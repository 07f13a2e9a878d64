"""Kernels of paged attention; see `triton_paged` for how they are launched.

The cache is [num_blocks, 2, G, block_size, D]. Shape letters: M rows of a query tile (a row is one
query head of one token), N positions of a context tile, D head dim padded to a power of two, S
splits padded likewise.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(
    do_not_specialize=[
        "table_stride", "first_row", "num_rows", "num_heads", "group_size", "block_shift",
        "num_splits", "scale",
    ],
)  # fmt: skip
def paged_attention_kernel(
    out, partial_out, partial_lse, q, cache, tables, query_starts, context_lens,
    block_stride, table_stride, first_row, num_rows, num_heads, group_size, block_shift,
    num_splits, scale,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    IS_DECODE: tl.constexpr,
):  # fmt: skip
    """Attention of one query tile to one split of its row's context, for one KV head.

    Grid (tiles, KV heads, splits). A tile packs the query heads that share the KV head, for as many
    tokens as fit into BLOCK_M rows. `scale` is log2(e) / sqrt(D), since powers of two are taken.
    With several splits each leaves its own average and the log2 of its weight, to be reduced.
    Source: Dao 2023, "FlashAttention-2", algorithm 1; splits: Dao et al. 2023, "Flash-Decoding".
    """
    kv_head = tl.program_id(1)
    block_q = BLOCK_M // group_size
    if IS_DECODE:
        row = tl.program_id(0)
        first_token = row
        end_token = row + 1
    else:
        row, first_token, end_token = _tile_span(
            tl.program_id(0), query_starts, first_row, num_rows, block_q
        )
    if first_token >= end_token:
        return
    rows_M = tl.arange(0, BLOCK_M)
    token_M = first_token + rows_M // group_size
    is_row_M = (token_M < end_token) & (rows_M < block_q * group_size)
    head_M = (token_M.to(tl.int64) * num_heads + kv_head * group_size) + rows_M % group_size
    context_len = tl.load(context_lens + row)
    # Rows that pad the tile see as much as its last token: a row that sees nothing would give NaN.
    position_M = tl.minimum(context_len - end_token + token_M, context_len - 1)
    last_token = tl.minimum(first_token + block_q, end_token) - 1
    start, end = _split_span(context_len - end_token + last_token + 1, num_splits, BLOCK_N)
    q_MD = _load_rows(q, head_M * HEAD_DIM, is_row_M, HEAD_DIM, BLOCK_D)
    acc_MD, total_M, peak_M = _attend(
        q_MD, cache + (kv_head << block_shift) * HEAD_DIM, tables + row.to(tl.int64) * table_stride,
        block_stride, block_shift, start, end, context_len - end_token + first_token, position_M,
        scale, HEAD_DIM, BLOCK_D, BLOCK_N,
    )  # fmt: skip
    mean_MD = acc_MD / tl.where(total_M > 0, total_M, 1.0)[:, None]
    if num_splits > 1:
        part_M = head_M * num_splits + tl.program_id(2)
        tl.store(partial_lse + part_M, peak_M + tl.log2(total_M), mask=is_row_M)
        _store_rows(partial_out, part_M * HEAD_DIM, mean_MD, is_row_M, HEAD_DIM, BLOCK_D)
    else:
        _store_rows(out, head_M * HEAD_DIM, mean_MD, is_row_M, HEAD_DIM, BLOCK_D)


@triton.jit(do_not_specialize=["num_splits"])
def reduce_splits_kernel(
    out, partial_out, partial_lse, num_splits,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """The splits' averages, weighted; one program per query head of a row."""
    head = tl.program_id(0).to(tl.int64)
    splits_S = tl.arange(0, BLOCK_S)
    is_split_S = splits_S < num_splits
    part_S = head * num_splits + splits_S
    lse_S = tl.load(partial_lse + part_S, mask=is_split_S, other=float("-inf"))
    # A split beyond the context has weight 0 (lse -inf); a row without context has only such.
    peak = tl.maximum(tl.max(lse_S, 0), -1.0e30)
    weight_S = tl.exp2(lse_S - peak)
    mean_SD = _load_rows(partial_out, part_S * HEAD_DIM, is_split_S, HEAD_DIM, BLOCK_D)
    total = tl.sum(weight_S, 0)
    mean_D = tl.sum(mean_SD * weight_S[:, None], 0) / tl.where(total > 0, total, 1.0)
    dims_D = tl.arange(0, BLOCK_D)
    target = out + head * HEAD_DIM + dims_D
    tl.store(target, mean_D.to(out.dtype.element_ty), mask=dims_D < HEAD_DIM)


@triton.jit
def _tile_span(tile, query_starts, first_row, num_rows, block_q):
    """(row, first token, end of the row's tokens) of a tile; empty if the tile is surplus.

    Row r begins with tile start(r) // block_q + r, counted from the first row: that leaves room
    for every row's last, partly filled tile, and is known without the lengths of all rows.
    """
    base = tl.load(query_starts + first_row)
    low, high = first_row, num_rows
    while high - low > 1:
        middle = (low + high) // 2
        first_tile = (tl.load(query_starts + middle) - base) // block_q + middle - first_row
        is_after = first_tile > tile
        low = tl.where(is_after, low, middle)
        high = tl.where(is_after, middle, high)
    start = tl.load(query_starts + low)
    first_tile = (start - base) // block_q + low - first_row
    return low, start + (tile - first_tile) * block_q, tl.load(query_starts + low + 1)


@triton.jit
def _split_span(end, num_splits, BLOCK_N: tl.constexpr):
    """This program's share [start, end) of positions [0, end), in whole context tiles."""
    tiles_per_split = tl.cdiv(tl.cdiv(end, BLOCK_N), num_splits)
    start = tl.program_id(2) * tiles_per_split * BLOCK_N
    return start, tl.minimum(end, start + tiles_per_split * BLOCK_N)


@triton.jit
def _attend(
    q_MD, cache, table, block_stride, block_shift, start, end, first_position, position_M, scale,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """(weighted sum of V, sum of weights, greatest score) over positions [start, end).

    `cache` points to the KV head's keys of block 0. Context tiles that every row of the query tile
    sees in whole come first, and need no causal mask.
    """
    acc_MD = tl.zeros(q_MD.shape, dtype=tl.float32)
    total_M = tl.zeros(position_M.shape, dtype=tl.float32)
    peak_M = tl.full(position_M.shape, float("-inf"), dtype=tl.float32)
    unmasked_end = tl.maximum(tl.minimum(end, first_position + 1) // BLOCK_N * BLOCK_N, start)
    for first in tl.range(start, unmasked_end, BLOCK_N):
        acc_MD, total_M, peak_M = _attend_tile(
            acc_MD, total_M, peak_M, q_MD, cache, table, block_stride, block_shift, first, end,
            position_M, scale, HEAD_DIM, BLOCK_D, BLOCK_N, False,
        )  # fmt: skip
    for first in tl.range(unmasked_end, end, BLOCK_N):
        acc_MD, total_M, peak_M = _attend_tile(
            acc_MD, total_M, peak_M, q_MD, cache, table, block_stride, block_shift, first, end,
            position_M, scale, HEAD_DIM, BLOCK_D, BLOCK_N, True,
        )  # fmt: skip
    return acc_MD, total_M, peak_M


@triton.jit
def _attend_tile(
    acc_MD, total_M, peak_M, q_MD, cache, table, block_stride, block_shift, first, end,
    position_M, scale,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr,
    IS_MASKED: tl.constexpr,
):  # fmt: skip
    """Take positions [first, first + BLOCK_N) into the running softmax; those from `end` on hold
    anything, also NaN, and are not read.
    """
    position_N = first + tl.arange(0, BLOCK_N)
    is_position_N = position_N < end
    block_N = tl.load(table + (position_N >> block_shift), mask=is_position_N, other=0)
    in_block_N = (position_N & ((1 << block_shift) - 1)) * HEAD_DIM
    start_N = block_N.to(tl.int64) * block_stride + in_block_N
    k_ND = _load_rows(cache, start_N, is_position_N, HEAD_DIM, BLOCK_D)
    score_MN = tl.dot(q_MD, tl.trans(k_ND), input_precision="ieee") * scale
    if IS_MASKED:
        is_seen_MN = position_N[None, :] <= position_M[:, None]
        score_MN = tl.where(is_seen_MN, score_MN, float("-inf"))
    new_peak_M = tl.maximum(peak_M, tl.max(score_MN, 1))
    weight_MN = tl.exp2(score_MN - new_peak_M[:, None])
    fade_M = tl.exp2(peak_M - new_peak_M)
    total_M = total_M * fade_M + tl.sum(weight_MN, 1)
    values = cache + (tl.num_programs(1) << block_shift) * HEAD_DIM
    v_ND = _load_rows(values, start_N, is_position_N, HEAD_DIM, BLOCK_D)
    acc_MD = acc_MD * fade_M[:, None]
    acc_MD = tl.dot(weight_MN.to(v_ND.dtype), v_ND, acc=acc_MD, input_precision="ieee")
    return acc_MD, total_M, new_peak_M


@triton.jit
def _load_rows(base, start_X, is_row_X, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """The D numbers from each of `start_X` on; zeros in padding."""
    dims_D = tl.arange(0, BLOCK_D)
    mask_XD = is_row_X[:, None]
    if BLOCK_D != HEAD_DIM:
        mask_XD = mask_XD & (dims_D < HEAD_DIM)[None, :]
    return tl.load(base + start_X[:, None] + dims_D[None, :], mask=mask_XD, other=0.0)


@triton.jit
def _store_rows(base, start_X, x_XD, is_row_X, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    dims_D = tl.arange(0, BLOCK_D)
    mask_XD = is_row_X[:, None] & (dims_D < HEAD_DIM)[None, :]
    target = base + start_X[:, None] + dims_D[None, :]
    tl.store(target, x_XD.to(base.dtype.element_ty), mask=mask_XD)
