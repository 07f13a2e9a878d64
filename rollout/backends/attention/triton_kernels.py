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
        "num_splits", "scale", "window", "softcap",
    ],
)  # fmt: skip
def paged_attention_kernel(
    out, partial_out, partial_lse, q, cache, tables, query_starts, context_lens, sinks,
    block_stride, table_stride, first_row, num_rows, num_heads, group_size, block_shift,
    num_splits, scale, window, softcap,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    IS_DECODE: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
):  # fmt: skip
    """Attention of one query tile to one split of its row's context, for one KV head.

    Grid (tiles, KV heads, splits). A tile packs the query heads that share the KV head, for as many
    tokens as fit into BLOCK_M rows. `scale` has a factor log2(e), since powers of two are taken; so
    has `softcap`. With several splits each leaves its own average and the log2 of its weight, to be
    reduced. `sinks` is None or a score for each query head, which the first split counts.
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
    first_position = context_len - end_token + first_token
    lowest = tl.maximum(first_position - window + 1, 0) if HAS_WINDOW else 0
    end = context_len - end_token + last_token + 1
    start, end = _split_span(lowest, end, num_splits, BLOCK_N)
    q_MD = _load_rows(q, head_M * HEAD_DIM, is_row_M, HEAD_DIM, BLOCK_D)
    peak_M, total_M = _sink(sinks, kv_head * group_size + rows_M % group_size, is_row_M)
    acc_MD, total_M, peak_M = _attend(
        total_M, peak_M, q_MD, cache + (kv_head << block_shift) * HEAD_DIM,
        tables + row.to(tl.int64) * table_stride, block_stride, block_shift, start, end,
        first_position, position_M, scale, window, softcap, HEAD_DIM, BLOCK_D, BLOCK_N, HAS_WINDOW,
        HAS_SOFTCAP,
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
def _split_span(lowest, end, num_splits, BLOCK_N: tl.constexpr):
    """This program's share [start, end) of positions [lowest, end), in whole context tiles."""
    first_tile = lowest // BLOCK_N
    tiles_per_split = tl.cdiv(tl.cdiv(end, BLOCK_N) - first_tile, num_splits)
    start = (first_tile + tl.program_id(2) * tiles_per_split) * BLOCK_N
    return start, tl.minimum(end, start + tiles_per_split * BLOCK_N)


@triton.jit
def _sink(sinks, head_M, is_row_M):
    """(greatest score, sum of weights) before any position: those of the heads' sinks, once."""
    total_M = tl.zeros(head_M.shape, dtype=tl.float32)
    peak_M = tl.full(head_M.shape, float("-inf"), dtype=tl.float32)
    if sinks is not None:
        is_first = tl.program_id(2) == 0
        sink_M = tl.load(sinks + head_M, mask=is_row_M & is_first, other=float("-inf"))
        peak_M = sink_M.to(tl.float32) * 1.4426950408889634
        total_M += tl.where(peak_M > float("-inf"), 1.0, 0.0)
    return peak_M, total_M


@triton.jit
def _attend(
    total_M, peak_M, q_MD, cache, table, block_stride, block_shift, start, end, first_position,
    position_M, scale, window, softcap,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
):  # fmt: skip
    """(weighted sum of V, sum of weights, greatest score) over positions [start, end).

    `cache` points to the KV head's keys of block 0. Context tiles that every row of the query tile
    sees in whole come first, and need no causal mask; with a window all tiles have a mask.
    """
    acc_MD = tl.zeros(q_MD.shape, dtype=tl.float32)
    unmasked_end = tl.maximum(tl.minimum(end, first_position + 1) // BLOCK_N * BLOCK_N, start)
    if HAS_WINDOW:
        unmasked_end = start
    for first in tl.range(start, unmasked_end, BLOCK_N):
        acc_MD, total_M, peak_M = _attend_tile(
            acc_MD, total_M, peak_M, q_MD, cache, table, block_stride, block_shift, first, end,
            position_M, scale, window, softcap, HEAD_DIM, BLOCK_D, BLOCK_N, False, False,
            HAS_SOFTCAP,
        )  # fmt: skip
    for first in tl.range(unmasked_end, end, BLOCK_N):
        acc_MD, total_M, peak_M = _attend_tile(
            acc_MD, total_M, peak_M, q_MD, cache, table, block_stride, block_shift, first, end,
            position_M, scale, window, softcap, HEAD_DIM, BLOCK_D, BLOCK_N, True, HAS_WINDOW,
            HAS_SOFTCAP,
        )  # fmt: skip
    return acc_MD, total_M, peak_M


@triton.jit
def _attend_tile(
    acc_MD, total_M, peak_M, q_MD, cache, table, block_stride, block_shift, first, end,
    position_M, scale, window, softcap,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr,
    IS_MASKED: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
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
    if HAS_SOFTCAP:
        score_MN = softcap * _tanh(score_MN / softcap)
    if IS_MASKED:
        is_seen_MN = position_N[None, :] <= position_M[:, None]
        if HAS_WINDOW:
            is_seen_MN = is_seen_MN & (position_N[None, :] > position_M[:, None] - window)
        score_MN = tl.where(is_seen_MN, score_MN, float("-inf"))
    new_peak_M = tl.maximum(peak_M, tl.max(score_MN, 1))
    base_M = new_peak_M
    if HAS_WINDOW:
        # Rows whose window begins after this tile have seen nothing yet: -inf - -inf is NaN.
        base_M = tl.where(new_peak_M == float("-inf"), 0.0, new_peak_M)
    weight_MN = tl.exp2(score_MN - base_M[:, None])
    fade_M = tl.exp2(peak_M - base_M)
    total_M = total_M * fade_M + tl.sum(weight_MN, 1)
    values = cache + (tl.num_programs(1) << block_shift) * HEAD_DIM
    v_ND = _load_rows(values, start_N, is_position_N, HEAD_DIM, BLOCK_D)
    acc_MD = acc_MD * fade_M[:, None]
    acc_MD = tl.dot(weight_MN.to(v_ND.dtype), v_ND, acc=acc_MD, input_precision="ieee")
    return acc_MD, total_M, new_peak_M


@triton.jit
def _tanh(x):
    """By one exponential; near 0, where that cancels, by Taylor's series to x^9."""
    square = x * x
    near = x * (
        1 + square * (-1 / 3 + square * (2 / 15 + square * (-17 / 315 + square * 62 / 2835)))
    )
    far = 1 - 2 / (tl.exp2(x * 2.8853900817779268) + 1)
    return tl.where(square < 0.0625, near, far)


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
