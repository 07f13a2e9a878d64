"""Triton kernels of paged attention, launched by `rollout.backends.cuda.attention`.

The kernels write the attention output `out`, and partial results that merging kernels read. The
cache is [num_blocks, 2 (keys, values), KV heads, block_size, HEAD_DIM]. Shape letters: M rows of a
query tile (a row is one query head of one token), N positions of a context tile, D head dim padded
to a power of two, S partial results that are merged at once, X rows of any kind.
"""

from __future__ import annotations

import triton
import triton.language as tl

from rollout.backends.cuda.attention_plan import share_of


@triton.jit(
    do_not_specialize=[
        "table_stride", "num_rows", "num_kv_heads", "group_size", "block_shift", "scale", "window",
        "softcap",
    ],
)  # fmt: skip
def decode_attention_kernel(
    out, partial_out, partial_lse, q, cache, tables, context_lens, sinks, tile_starts, first_rows,
    block_stride, table_stride, num_rows, num_kv_heads, group_size, block_shift, scale, window,
    softcap,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
):  # fmt: skip
    """Attend over one program's share of the context tiles of all decode rows and KV heads.

    All context tiles are numbered: first along a row's context, then over its KV heads, then over
    the rows. `share_of` cuts the numbers into equal shares, which can span several rows. If a share
    has all tiles of a row and KV head, the result goes to `out`. Otherwise program p writes a
    partial result. The partial result has the number 2 p + 1 if the share has the first of these
    tiles, else 2 p. `scale` and `softcap` include a factor log2(e), because the softmax uses powers
    of two. `sinks` is None, or has a score for each query head, which the program with the first
    tile adds. Sources: Osama et al. 2023, "Stream-K", for the equal shares; Dao et al. 2023,
    "Flash-Decoding", for the partial results.
    """
    program = tl.program_id(0)
    num_all_tiles = tl.load(tile_starts + num_rows) * num_kv_heads
    tile, end_tile = share_of(program, tl.num_programs(0), num_all_tiles)
    row = tl.load(first_rows + program)
    rows_M = tl.arange(0, BLOCK_M)
    is_row_M = rows_M < group_size
    while tile < end_tile:
        row_start = tl.load(tile_starts + row)
        num_tiles = tl.load(tile_starts + row + 1) - row_start
        kv_head = (tile - row_start * num_kv_heads) // num_tiles
        first = (tile - row_start * num_kv_heads) % num_tiles
        count = tl.minimum(num_tiles - first, end_tile - tile)
        context_len = tl.load(context_lens + row)
        lowest = tl.maximum(context_len - window, 0) if HAS_WINDOW else 0
        start = (lowest // BLOCK_N + first) * BLOCK_N
        end = tl.minimum(start + count * BLOCK_N, context_len)
        head_M = (row.to(tl.int64) * num_kv_heads + kv_head) * group_size + rows_M
        q_MD = _load_rows(q, head_M * HEAD_DIM, is_row_M, HEAD_DIM, BLOCK_D)
        peak_M, total_M = _sink(sinks, kv_head * group_size + rows_M, is_row_M & (first == 0))
        acc_MD, total_M, peak_M = _attend(
            total_M, peak_M, q_MD, cache + (kv_head << block_shift) * HEAD_DIM,
            (num_kv_heads << block_shift) * HEAD_DIM, tables + row.to(tl.int64) * table_stride,
            block_stride, block_shift, start, end, context_len - 1,
            tl.zeros_like(rows_M) + context_len - 1, scale, window, softcap,
            HEAD_DIM, BLOCK_D, BLOCK_N, HAS_WINDOW, HAS_SOFTCAP,
        )  # fmt: skip
        mean_MD = acc_MD / tl.where(total_M > 0, total_M, 1.0)[:, None]
        if count == num_tiles:
            _store_rows(out, head_M * HEAD_DIM, mean_MD, is_row_M, HEAD_DIM, BLOCK_D)
        else:
            part = 2 * program + (first == 0).to(tl.int32)
            part_M = part.to(tl.int64) * group_size + rows_M
            tl.store(partial_lse + part_M, peak_M + tl.log2(total_M), mask=is_row_M)
            _store_rows(partial_out, part_M * HEAD_DIM, mean_MD, is_row_M, HEAD_DIM, BLOCK_D)
        tile += count
        row += (tile == (row_start + num_tiles) * num_kv_heads).to(tl.int32)


@triton.jit(do_not_specialize=["num_rows", "num_kv_heads", "group_size"])
def merge_parts_kernel(
    out, partial_out, partial_lse, tile_starts, first_rows, num_rows, num_kv_heads, group_size,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """Merge the partial results of `decode_attention_kernel` into `out`. The grid is (programs of
    that kernel, group size). A program merges one query head of the KV head whose context tiles
    begin in its share and end in a later share. A program without such a KV head does nothing."""
    program, member = tl.program_id(0), tl.program_id(1)
    num_all_tiles = tl.load(tile_starts + num_rows) * num_kv_heads
    start, next_start = share_of(program, tl.num_programs(0), num_all_tiles)
    if next_start >= num_all_tiles:
        return
    share = next_start - start
    row = tl.load(first_rows + program + 1)
    row_start = tl.load(tile_starts + row)
    num_tiles = tl.load(tile_starts + row + 1) - row_start
    kv_head = (next_start - row_start * num_kv_heads) // num_tiles
    head_start = row_start * num_kv_heads + kv_head * num_tiles
    # Either the next share starts with a new head, or an earlier program merges this head.
    if (head_start == next_start) | (head_start < start):
        return
    num_parts = tl.cdiv(head_start + num_tiles, share) - program
    mean_D = _merge_parts(
        partial_out + member * HEAD_DIM, partial_lse + member, group_size, 2 * program, 2,
        num_parts, HEAD_DIM, BLOCK_D, BLOCK_S,
    )  # fmt: skip
    dims_D = tl.arange(0, BLOCK_D)
    head = (row.to(tl.int64) * num_kv_heads + kv_head) * group_size + member
    tl.store(out + head * HEAD_DIM + dims_D, mean_D.to(out.dtype.element_ty), dims_D < HEAD_DIM)


@triton.jit(
    do_not_specialize=[
        "table_stride", "num_kv_heads", "group_size", "block_shift", "scale", "window", "softcap",
    ],
)  # fmt: skip
def prefill_attention_kernel(
    out, partial_out, partial_lse, q, cache, tables, context_lens, sinks,
    query_starts, tile_rows, tile_tokens, first_programs, program_tiles,
    block_stride, table_stride, num_kv_heads, group_size, block_shift, scale, window, softcap,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
):  # fmt: skip
    """Attend from one query tile over its row's context or a part of it, for one KV head.

    A tile has the query heads that share the KV head, for as many tokens as fit into BLOCK_M rows.
    `program_tiles` has the query tile of each program, and -1 for surplus programs. A tile has one
    program for each KV head and part of its context, head by head, from `first_programs` on. The
    result over a whole context goes to `out`. The result over a part is a partial result, which
    `merge_prefill_kernel` merges. `scale`, `softcap` and `sinks` are as in
    `decode_attention_kernel`. Source: Dao 2023, "FlashAttention-2", algorithm 1.
    """
    program = tl.program_id(0)
    tile = tl.load(program_tiles + program)
    if tile < 0:
        return
    row = tl.load(tile_rows + tile)
    first_token = tl.load(tile_tokens + tile)
    end_token = tl.load(query_starts + row + 1)
    first_program = tl.load(first_programs + tile)
    num_parts = (tl.load(first_programs + tile + 1) - first_program) // num_kv_heads
    kv_head = (program - first_program) // num_parts
    part = (program - first_program) % num_parts
    block_q = BLOCK_M // group_size
    rows_M = tl.arange(0, BLOCK_M)
    token_M = first_token + rows_M // group_size
    is_row_M = (token_M < end_token) & (rows_M < block_q * group_size)
    num_heads = num_kv_heads * group_size
    head_M = (token_M.to(tl.int64) * num_heads + kv_head * group_size) + rows_M % group_size
    context_len = tl.load(context_lens + row)
    # Padding rows of the tile attend to as many positions as the row's last token.
    position_M = tl.minimum(context_len - end_token + token_M, context_len - 1)
    last_token = tl.minimum(first_token + block_q, end_token) - 1
    first_position = context_len - end_token + first_token
    start = tl.maximum(first_position - window + 1, 0) // BLOCK_N * BLOCK_N if HAS_WINDOW else 0
    end = context_len - end_token + last_token + 1
    num_tiles = tl.cdiv(end - start, BLOCK_N)
    end = tl.minimum(start + num_tiles * (part + 1) // num_parts * BLOCK_N, end)
    start += num_tiles * part // num_parts * BLOCK_N
    q_MD = _load_rows(q, head_M * HEAD_DIM, is_row_M, HEAD_DIM, BLOCK_D)
    is_counted_M = is_row_M & (part == 0)
    peak_M, total_M = _sink(sinks, kv_head * group_size + rows_M % group_size, is_counted_M)
    acc_MD, total_M, peak_M = _attend(
        total_M, peak_M, q_MD, cache + (kv_head << block_shift) * HEAD_DIM,
        (num_kv_heads << block_shift) * HEAD_DIM, tables + row.to(tl.int64) * table_stride,
        block_stride, block_shift, start, end, first_position, position_M, scale, window, softcap,
        HEAD_DIM, BLOCK_D, BLOCK_N, HAS_WINDOW, HAS_SOFTCAP,
    )  # fmt: skip
    mean_MD = acc_MD / tl.where(total_M > 0, total_M, 1.0)[:, None]
    if num_parts == 1:
        _store_rows(out, head_M * HEAD_DIM, mean_MD, is_row_M, HEAD_DIM, BLOCK_D)
    else:
        place_M = program.to(tl.int64) * (block_q * group_size) + rows_M
        tl.store(partial_lse + place_M, peak_M + tl.log2(total_M), mask=is_row_M)
        _store_rows(partial_out, place_M * HEAD_DIM, mean_MD, is_row_M, HEAD_DIM, BLOCK_D)


@triton.jit(do_not_specialize=["num_kv_heads", "group_size", "block_q"])
def merge_prefill_kernel(
    out, partial_out, partial_lse, query_starts, tile_rows, tile_tokens, first_programs, num_cut,
    num_kv_heads, group_size, block_q,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """Merge the partial results of `prefill_attention_kernel` into `out`. The first `num_cut` query
    tiles have partial results. Any number of programs can share the work. A program merges one
    query head of one token at a time."""
    size = block_q * group_size
    item = tl.program_id(0)
    num_items = tl.load(num_cut) * num_kv_heads * size
    dims_D = tl.arange(0, BLOCK_D)
    while item < num_items:
        member = item % size
        tile = item // size // num_kv_heads
        kv_head = item // size % num_kv_heads
        token = tl.load(tile_tokens + tile) + member // group_size
        if token < tl.load(query_starts + tl.load(tile_rows + tile) + 1):
            first_program = tl.load(first_programs + tile)
            num_parts = (tl.load(first_programs + tile + 1) - first_program) // num_kv_heads
            mean_D = _merge_parts(
                partial_out + member * HEAD_DIM, partial_lse + member, size,
                first_program + kv_head * num_parts, 1, num_parts, HEAD_DIM, BLOCK_D, BLOCK_S,
            )  # fmt: skip
            head = (token.to(tl.int64) * num_kv_heads + kv_head) * group_size + member % group_size
            target = out + head * HEAD_DIM + dims_D
            tl.store(target, mean_D.to(out.dtype.element_ty), dims_D < HEAD_DIM)
        item += tl.num_programs(0)


@triton.jit
def _merge_parts(
    partial_out, partial_lse, stride, first_part, STEP: tl.constexpr, num_parts,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """Return the merged result of `num_parts` partial results, weighted by their `partial_lse`.

    With STEP 1 their numbers are consecutive, from `first_part` on. With STEP 2 they are
    `first_part` plus 1, 2, 4, 6 and so on. Partial results with neighbouring numbers are `stride`
    rows apart in memory.
    """
    peak = -1.0e30
    total = 0.0
    acc_D = tl.zeros([BLOCK_D], dtype=tl.float32)
    for first in tl.range(0, num_parts, BLOCK_S):
        parts_S = first + tl.arange(0, BLOCK_S)
        is_part_S = parts_S < num_parts
        place_S = first_part + STEP * parts_S + (parts_S == 0).to(tl.int32) * (STEP - 1)
        place_S = place_S.to(tl.int64) * stride
        lse_S = tl.load(partial_lse + place_S, mask=is_part_S, other=float("-inf"))
        new_peak = tl.maximum(peak, tl.max(lse_S, 0))
        weight_S = tl.exp2(lse_S - new_peak)
        mean_SD = _load_rows(partial_out, place_S * HEAD_DIM, is_part_S, HEAD_DIM, BLOCK_D)
        fade = tl.exp2(peak - new_peak)
        acc_D = acc_D * fade + tl.sum(mean_SD * weight_S[:, None], 0)
        total = total * fade + tl.sum(weight_S, 0)
        peak = new_peak
    return acc_D / tl.where(total > 0, total, 1.0)


@triton.jit
def _sink(sinks, head_M, is_counted_M):
    """Return the initial greatest score and sum of weights of each row's softmax. Both come from
    the row's sink if `sinks` is given and the row is in `is_counted_M`. Otherwise they are -inf and
    0."""
    total_M = tl.zeros(head_M.shape, dtype=tl.float32)
    peak_M = tl.full(head_M.shape, float("-inf"), dtype=tl.float32)
    if sinks is not None:
        sink_M = tl.load(sinks + head_M, mask=is_counted_M, other=float("-inf"))
        peak_M = sink_M.to(tl.float32) * 1.4426950408889634
        total_M += tl.where(peak_M > float("-inf"), 1.0, 0.0)
    return peak_M, total_M


@triton.jit
def _attend(
    total_M, peak_M, q_MD, cache, values_offset, table, block_stride, block_shift, start, end,
    first_position, position_M, scale, window, softcap,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
):  # fmt: skip
    """Return (weighted sum of V, sum of weights, greatest score) over positions [start, end).
    `total_M` and `peak_M` are the initial sum and score. `cache` points to the KV head's keys of
    block 0. The values are `values_offset` after the keys."""
    # All rows of the query tile attend to the first context tiles whole, so these need no causal
    # mask. With a window, all tiles are masked.
    acc_MD = tl.zeros(q_MD.shape, dtype=tl.float32)
    unmasked_end = tl.maximum(tl.minimum(end, first_position + 1) // BLOCK_N * BLOCK_N, start)
    if HAS_WINDOW:
        unmasked_end = start
    for first in tl.range(start, unmasked_end, BLOCK_N):
        acc_MD, total_M, peak_M = _attend_tile(
            acc_MD, total_M, peak_M, q_MD, cache, values_offset, table, block_stride, block_shift,
            first, end, position_M, scale, window, softcap, HEAD_DIM, BLOCK_D, BLOCK_N, False,
            False, HAS_SOFTCAP,
        )  # fmt: skip
    for first in tl.range(unmasked_end, end, BLOCK_N):
        acc_MD, total_M, peak_M = _attend_tile(
            acc_MD, total_M, peak_M, q_MD, cache, values_offset, table, block_stride, block_shift,
            first, end, position_M, scale, window, softcap, HEAD_DIM, BLOCK_D, BLOCK_N, True,
            HAS_WINDOW, HAS_SOFTCAP,
        )  # fmt: skip
    return acc_MD, total_M, peak_M


@triton.jit
def _attend_tile(
    acc_MD, total_M, peak_M, q_MD, cache, values_offset, table, block_stride, block_shift, first,
    end, position_M, scale, window, softcap,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr,
    IS_MASKED: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
):  # fmt: skip
    """Return the running softmax with positions [first, first + BLOCK_N) added. Positions from
    `end` on are not read."""
    position_N = first + tl.arange(0, BLOCK_N)
    is_position_N = position_N < end  # later positions may hold anything, even NaN
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
    if IS_MASKED:
        # A row may have attended to no position yet; -inf - -inf would be NaN.
        base_M = tl.where(new_peak_M == float("-inf"), 0.0, new_peak_M)
    weight_MN = tl.exp2(score_MN - base_M[:, None])
    fade_M = tl.exp2(peak_M - base_M)
    total_M = total_M * fade_M + tl.sum(weight_MN, 1)
    v_ND = _load_rows(cache + values_offset, start_N, is_position_N, HEAD_DIM, BLOCK_D)
    acc_MD = acc_MD * fade_M[:, None]
    acc_MD = tl.dot(weight_MN.to(v_ND.dtype), v_ND, acc=acc_MD, input_precision="ieee")
    return acc_MD, total_M, new_peak_M


@triton.jit
def _tanh(x):
    """Return tanh(x)."""
    # By one exponential; near 0, where that would cancel digits, by the Taylor series to x^9.
    square = x * x
    near = x * (
        1 + square * (-1 / 3 + square * (2 / 15 + square * (-17 / 315 + square * 62 / 2835)))
    )
    far = 1 - 2 / (tl.exp2(x * 2.8853900817779268) + 1)
    return tl.where(square < 0.0625, near, far)


@triton.jit
def _load_rows(base, start_X, is_row_X, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """Return a row of HEAD_DIM numbers from each offset `start_X` on, padded with zeros to BLOCK_D.
    Rows that are not in `is_row_X` are zeros."""
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
