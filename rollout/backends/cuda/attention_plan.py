"""TritonPlan: the division of a step's attention into programs, computed on the device.

TritonPagedAttention in `rollout.backends.cuda.attention` creates a TritonPlan for each forward
pass, which all layers share. The kernels of `rollout.backends.cuda.attention_kernels` use
`share_of`.

For decode, the context tiles of all rows and KV heads are put in one sequence and cut into equal
shares, one for each program. For prefill, query tiles are sorted by the lengths of their contexts,
the longest first. If whole tiles would leave multiprocessors idle, long contexts are cut into parts
of one size. Grids depend only on shapes, so that a captured graph is right for any lengths. Shape
letters: R rows, E = R + 1, P programs, Q query tiles, F = Q + 1.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from rollout.backends.forward_batch import ForwardBatch

MIN_TILES_PER_PROGRAM = 2  # for fewer tiles a partial result, and merging it, is too expensive
_MIN_TILES: tl.constexpr = tl.constexpr(MIN_TILES_PER_PROGRAM)
# Contexts are cut only if the last program would end later than the mean end by more than a quarter
# of it, and by more than this many context tiles: about the cost of partial results.
WORTH_CUTTING = 8
# Limits of prefill per program that the device runs at once: parts in excess of one for each tile
# and head, and parts of cut tiles. See `_part_size`.
SURPLUS_PARTS, CUT_PARTS = 4, 8
_WAVES: tl.constexpr = tl.constexpr(SURPLUS_PARTS)
_SIZES: tl.constexpr = tl.constexpr(8)  # part sizes to try for each number of waves
BLOCK = 256  # rows, programs or tiles that a program of these kernels processes at once
BLOCK_J = 16  # tiles that `order_tiles_kernel` compares with a block at once


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillPlan:
    """Query tiles, the longest context first, and the programs that compute them. All tensors are
    int32. Each tile has one program per KV head and part of its context, and the programs of one
    head are consecutive. Tiles whose contexts are cut come first, so the programs of parts have the
    lowest numbers."""

    rows_Q: Tensor  # row of each tile; -1 for surplus tiles
    tokens_Q: Tensor  # first token of each tile
    first_programs_F: Tensor  # first program of each tile; at the end, the number of programs
    num_cut: Tensor  # [1]: number of tiles whose contexts are cut
    tiles_P: Tensor  # tile of each program; -1 for surplus programs
    num_partials: int  # number of first programs that may have a part; 0 if nothing may be cut


class TritonPlan:
    """The division of work that all layers of a forward pass share. Kernels compute it at first
    use, once for each window and set of tile sizes."""

    def __init__(self, batch: ForwardBatch) -> None:
        self._query_starts_E, self._context_lens_R = batch.query_starts_E, batch.context_lens_R
        self._num_decode_rows = batch.num_decode_rows
        self._decode: dict[tuple[int | None, ...], tuple[Tensor, Tensor]] = {}
        self._prefill: dict[tuple[int | None, ...], PrefillPlan] = {}

    def decode(
        self, *, window: int | None, block_n: int, num_kv_heads: int, num_programs: int
    ) -> tuple[Tensor, Tensor]:
        """Return each decode row's first context tile, [E], and each program's first row, [P], both
        int32. Context tiles are numbered over all decode rows, for one KV head. The last entry of
        the first tensor is their total number."""
        key = window, block_n, num_kv_heads, num_programs
        if key not in self._decode:
            num_rows, device = self._num_decode_rows, self._context_lens_R.device
            tile_starts_E = torch.empty(num_rows + 1, dtype=torch.int32, device=device)
            first_rows_P = torch.empty(num_programs, dtype=torch.int32, device=device)
            tile_starts_kernel[(1,)](
                *(tile_starts_E, self._context_lens_R, num_rows, window or 0),
                BLOCK_N=block_n,
                HAS_WINDOW=window is not None,
                BLOCK=BLOCK,
            )
            first_rows_kernel[(triton.cdiv(num_programs, BLOCK),)](
                *(first_rows_P, tile_starts_E, num_rows, num_kv_heads, num_programs),
                BLOCK=BLOCK,
            )
            self._decode[key] = tile_starts_E, first_rows_P
        return self._decode[key]

    def prefill(
        self,
        *,
        window: int | None,
        block_n: int,
        block_q: int,
        num_tokens: int,
        num_kv_heads: int,
        num_resident: int,
        table_tokens: int,
    ) -> PrefillPlan:
        """Return the plan for the rows after the decode rows, which have `num_tokens` tokens.

        `block_q` is the number of tokens of a query tile. `num_resident` is the number of programs
        that the device runs at once. `table_tokens` is the longest context that a block table can
        hold. The numbers of tiles and programs suffice for any lengths of the rows.
        """
        key = window, block_n, block_q, num_tokens, num_kv_heads, num_resident, table_tokens
        if key not in self._prefill:
            tiles_3Q = self._ordered_tiles(window, block_n, block_q, num_tokens)
            if window is not None:
                table_tokens = min(table_tokens, window + block_q + block_n)
            may_cut = table_tokens > WORTH_CUTTING * block_n
            self._prefill[key] = _programs(tiles_3Q, num_kv_heads, num_resident, may_cut)
        return self._prefill[key]

    def _ordered_tiles(
        self, window: int | None, block_n: int, block_q: int, num_tokens: int
    ) -> Tensor:
        """Return row, first token and number of context tiles of each query tile, [3, Q], longest
        first."""
        first_row, device = self._num_decode_rows, self._context_lens_R.device
        num_rows = self._context_lens_R.shape[0] - first_row
        # Each of the three starts at a multiple of 16 bytes, or Triton would compile kernels again.
        num_tiles = num_tokens // block_q + num_rows
        shape = 2, 3, triton.cdiv(num_tiles, 4) * 4
        wide = torch.empty(shape, dtype=torch.int32, device=device)
        tiles_3Q, ordered_3Q = wide[0, :, :num_tiles], wide[1, :, :num_tiles]
        grid = (triton.cdiv(num_tiles, BLOCK),)
        query_tiles_kernel[grid](
            *(*tiles_3Q, self._query_starts_E, self._context_lens_R),
            *(first_row, first_row + num_rows, block_q, num_tiles, window or 0),
            BLOCK_N=block_n,
            HAS_WINDOW=window is not None,
            BLOCK=BLOCK,
        )
        order_tiles_kernel[grid](*(*ordered_3Q, *tiles_3Q, num_tiles), BLOCK=BLOCK, BLOCK_J=BLOCK_J)
        return ordered_3Q


def _programs(tiles_3Q: Tensor, num_kv_heads: int, num_resident: int, may_cut: bool) -> PrefillPlan:
    """Return the plan for the sorted tiles. If `may_cut` is False, contexts must be too short to be
    cut, and there is no room for partial results."""
    num_tiles = tiles_3Q.shape[1]
    num_programs, num_partials = num_tiles * num_kv_heads, 0
    if may_cut:
        num_programs += SURPLUS_PARTS * num_resident
        num_partials = min(CUT_PARTS * num_resident, num_programs)
    rows_Q, tokens_Q, lengths_Q = tiles_3Q
    first_programs_F, num_cut, tiles_P = (
        torch.empty(size, dtype=torch.int32, device=tiles_3Q.device)
        for size in (num_tiles + 1, 1, num_programs)
    )
    cut_tiles_kernel[(1,)](
        *(first_programs_F, num_cut, lengths_Q, num_tiles, num_kv_heads),
        *(num_resident, WORTH_CUTTING),
        BLOCK=BLOCK,
    )
    program_tiles_kernel[(triton.cdiv(num_programs, BLOCK),)](
        *(tiles_P, first_programs_F, num_tiles, num_programs), BLOCK=BLOCK
    )
    return PrefillPlan(
        rows_Q=rows_Q,
        tokens_Q=tokens_Q,
        first_programs_F=first_programs_F,
        num_cut=num_cut,
        tiles_P=tiles_P,
        num_partials=num_partials,
    )


@triton.jit
def share_of(program, num_programs, num_tiles):
    """Return the context tiles [start, end) of a program. Shares are equal, but the last share with
    work can be smaller, and later shares are empty."""
    share = tl.maximum(tl.cdiv(num_tiles, num_programs), _MIN_TILES)
    start = program * share
    return start, tl.minimum(start + share, num_tiles)


@triton.jit(do_not_specialize=["num_rows", "window"])
def tile_starts_kernel(
    tile_starts, context_lens, num_rows, window,
    BLOCK_N: tl.constexpr, HAS_WINDOW: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Store the running sum of the rows' numbers of context tiles, each at least 1. Runs as one
    program."""
    total = tl.zeros([], tl.int32)
    tl.store(tile_starts, total)
    for first in tl.range(0, num_rows, BLOCK):
        rows_B = first + tl.arange(0, BLOCK)
        is_row_B = rows_B < num_rows
        length_B = tl.load(context_lens + rows_B, mask=is_row_B, other=0)
        num_tiles_B = tl.cdiv(length_B, BLOCK_N)
        if HAS_WINDOW:
            num_tiles_B -= tl.maximum(length_B - window, 0) // BLOCK_N
        num_tiles_B = tl.where(is_row_B, tl.maximum(num_tiles_B, 1), 0)
        tl.store(tile_starts + 1 + rows_B, total + tl.cumsum(num_tiles_B), mask=is_row_B)
        total += tl.sum(num_tiles_B)


@triton.jit(do_not_specialize=["num_rows", "num_kv_heads", "num_programs"])
def first_rows_kernel(
    first_rows, tile_starts, num_rows, num_kv_heads, num_programs, BLOCK: tl.constexpr
):
    """Store the row of each program's first tile, by bisection. The value is arbitrary for programs
    without work."""
    programs_B = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    num_tiles = tl.load(tile_starts + num_rows) * num_kv_heads
    tile_B, _ = share_of(programs_B, num_programs, num_tiles)
    low_B = tl.zeros_like(programs_B)
    high_B = low_B + num_rows
    width = num_rows
    while width > 1:
        middle_B = (low_B + high_B) // 2
        is_after_B = tl.load(tile_starts + middle_B) * num_kv_heads > tile_B
        low_B = tl.where(is_after_B, low_B, middle_B)
        high_B = tl.where(is_after_B, middle_B, high_B)
        width = (width + 1) // 2
    tl.store(first_rows + programs_B, low_B, mask=programs_B < num_programs)


@triton.jit(do_not_specialize=["first_row", "end_row", "block_q", "num_tiles", "window"])
def query_tiles_kernel(
    tile_rows, tile_tokens, tile_lengths, query_starts, context_lens, first_row, end_row, block_q,
    num_tiles, window,
    BLOCK_N: tl.constexpr, HAS_WINDOW: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Store row, first token and number of context tiles of each query tile. Surplus tiles get row
    -1 and 0 context tiles."""
    # Row r has its first tile at start(r) // block_q + r, counted from the first row. This leaves
    # room for each row's last, partly filled tile, and needs no other row's length.
    tile_B = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    base = tl.load(query_starts + first_row)
    low_B = tl.zeros_like(tile_B) + first_row
    high_B = tl.zeros_like(tile_B) + end_row
    width = end_row - first_row
    while width > 1:
        middle_B = (low_B + high_B) // 2
        start_B = tl.load(query_starts + middle_B) - base
        is_after_B = start_B // block_q + middle_B - first_row > tile_B
        low_B = tl.where(is_after_B, low_B, middle_B)
        high_B = tl.where(is_after_B, middle_B, high_B)
        width = (width + 1) // 2
    start_B = tl.load(query_starts + low_B)
    end_B = tl.load(query_starts + low_B + 1)
    token_B = start_B + (tile_B - (start_B - base) // block_q - low_B + first_row) * block_q
    is_tile_B = token_B < end_B
    before_B = tl.load(context_lens + low_B) - end_B  # position of token t in its row is this + t
    length_B = tl.cdiv(before_B + tl.minimum(token_B + block_q, end_B), BLOCK_N)
    if HAS_WINDOW:
        length_B -= tl.maximum(before_B + token_B - window + 1, 0) // BLOCK_N
    is_here_B = tile_B < num_tiles
    tl.store(tile_rows + tile_B, tl.where(is_tile_B, low_B, -1), mask=is_here_B)
    tl.store(tile_tokens + tile_B, token_B, mask=is_here_B)
    tl.store(tile_lengths + tile_B, tl.where(is_tile_B, length_B, 0), mask=is_here_B)


@triton.jit(do_not_specialize=["num_tiles"])
def order_tiles_kernel(
    ordered_rows, ordered_tokens, ordered_lengths, tile_rows, tile_tokens, tile_lengths, num_tiles,
    BLOCK: tl.constexpr, BLOCK_J: tl.constexpr,
):  # fmt: skip
    """Sort tiles by descending length, stably. A tile's place is the number of tiles before it."""
    tile_B = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_here_B = tile_B < num_tiles
    length_B = tl.load(tile_lengths + tile_B, mask=is_here_B, other=0)
    rank_B = tl.zeros_like(tile_B)
    for first in tl.range(0, num_tiles, BLOCK_J):
        tile_J = first + tl.arange(0, BLOCK_J)
        length_J = tl.load(tile_lengths + tile_J, mask=tile_J < num_tiles, other=-1)
        is_before_BJ = length_J[None, :] > length_B[:, None]
        is_equal_BJ = length_J[None, :] == length_B[:, None]
        is_before_BJ = is_before_BJ | (is_equal_BJ & (tile_J[None, :] < tile_B[:, None]))
        rank_B += tl.sum(is_before_BJ.to(tl.int32), 1)
    row_B = tl.load(tile_rows + tile_B, mask=is_here_B, other=0)
    token_B = tl.load(tile_tokens + tile_B, mask=is_here_B, other=0)
    tl.store(ordered_rows + rank_B, row_B, mask=is_here_B)
    tl.store(ordered_tokens + rank_B, token_B, mask=is_here_B)
    tl.store(ordered_lengths + rank_B, length_B, mask=is_here_B)


@triton.jit(do_not_specialize=["num_tiles", "num_kv_heads", "num_resident", "worth"])
def cut_tiles_kernel(
    first_programs, num_cut, tile_lengths, num_tiles, num_kv_heads, num_resident, worth,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Store each tile's first program and the number of cut tiles. Runs as one program.

    Decides into how many parts each query tile's context is cut. The device starts a program when
    an earlier one ends. Tiles stay whole if an estimate says that the last tile ends early enough
    (WORTH_CUTTING). In the estimate, a tile of the first wave starts at once. The i-th tile of the
    second wave starts when the i-th last tile of the first wave ends. All later tiles start, at the
    latest, at the mean end of the tiles before them.
    """
    total = tl.zeros([], tl.int64)
    latest = tl.zeros([], tl.int64)  # times are in context tiles over `num_resident`
    for first in tl.range(0, num_tiles, BLOCK):
        tile_B = first + tl.arange(0, BLOCK)
        is_tile_B = tile_B < num_tiles
        length_B = tl.load(tile_lengths + tile_B, mask=is_tile_B, other=0).to(tl.int64)
        program_B = (tile_B + 1) * num_kv_heads - 1  # the last head's program starts the latest
        start_B = (total + tl.cumsum(length_B)) * num_kv_heads - length_B
        pair_B = 2 * num_resident - 1 - program_B
        is_second_B = is_tile_B & (program_B >= num_resident) & (pair_B >= 0)
        pair_length_B = tl.load(tile_lengths + pair_B // num_kv_heads, mask=is_second_B, other=0)
        pair_end_B = pair_length_B.to(tl.int64) * num_resident
        start_B = tl.where(is_second_B, tl.minimum(start_B, pair_end_B), start_B)
        start_B = tl.where(program_B < num_resident, 0, start_B)
        latest = tl.maximum(latest, tl.max(start_B + length_B * num_resident))
        total += tl.sum(length_B)
    total *= num_kv_heads
    size = tl.full([], 2**30, tl.int32)
    if latest - total > tl.maximum(total // 4, worth * num_resident):
        size = _part_size(tile_lengths, total, num_tiles, num_kv_heads, num_resident, BLOCK)
    num_programs = tl.zeros([], tl.int32)
    count = tl.zeros([], tl.int32)
    for first in tl.range(0, num_tiles, BLOCK):
        tile_B = first + tl.arange(0, BLOCK)
        is_tile_B = tile_B < num_tiles
        parts_B = tl.cdiv(tl.load(tile_lengths + tile_B, mask=is_tile_B, other=0), size)
        end_B = num_programs + tl.cumsum(parts_B) * num_kv_heads
        tl.store(first_programs + tile_B, end_B - parts_B * num_kv_heads, mask=is_tile_B)
        num_programs += tl.sum(parts_B) * num_kv_heads
        count += tl.sum((parts_B > 1).to(tl.int32))
    tl.store(first_programs + num_tiles, num_programs)
    tl.store(num_cut, count)


@triton.jit
def _part_size(
    tile_lengths, total, num_tiles, num_kv_heads, num_resident, BLOCK: tl.constexpr
):  # fmt: skip
    """Return the largest number of context tiles of a part.

    A wave is `num_resident` programs, which run at once. The size is the smallest with which all
    parts fit in one wave, among eight sizes from the mean share of a program to 7/32 more. If none
    fits, the size is chosen in the same way for two, three or four waves, from a half, a third or a
    quarter of the mean share. If none fits in four waves, the size is a quarter of the mean share.
    """
    # With a quarter of the mean, the last part ends at most that much after the mean. There are
    # then at most 4 `num_resident` parts in excess of one for each tile and head. Cut tiles are
    # longer than a part, so they have at most 8 `num_resident` parts in all.
    choice_C = tl.arange(0, _WAVES * _SIZES)
    waves_C = choice_C // _SIZES + 1
    size_C = total * (32 + choice_C % _SIZES) // (32 * waves_C * num_resident)
    size_C = tl.maximum(size_C, 1).to(tl.int32)
    num_parts_C = tl.zeros_like(size_C)
    for first in tl.range(0, num_tiles, BLOCK):
        tile_B = first + tl.arange(0, BLOCK)
        length_B = tl.load(tile_lengths + tile_B, mask=tile_B < num_tiles, other=0)
        num_parts_C += tl.sum(tl.cdiv(length_B[None, :], size_C[:, None]), 1) * num_kv_heads
    choice = tl.min(tl.where(num_parts_C <= waves_C * num_resident, choice_C, _WAVES * _SIZES))
    size = tl.sum(tl.where(choice_C == choice, size_C, 0))
    quarter = tl.cdiv(total, _WAVES * num_resident).to(tl.int32)
    return tl.where(choice < _WAVES * _SIZES, size, quarter)


@triton.jit(do_not_specialize=["num_tiles", "num_programs"])
def program_tiles_kernel(
    program_tiles, first_programs, num_tiles, num_programs, BLOCK: tl.constexpr
):
    """Store the query tile of each program, by bisection. Surplus programs get -1."""
    program_B = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    low_B = tl.zeros_like(program_B)
    high_B = low_B + num_tiles
    width = num_tiles
    while width > 1:
        middle_B = (low_B + high_B) // 2
        is_after_B = tl.load(first_programs + middle_B) > program_B
        low_B = tl.where(is_after_B, low_B, middle_B)
        high_B = tl.where(is_after_B, middle_B, high_B)
        width = (width + 1) // 2
    is_used_B = program_B < tl.load(first_programs + num_tiles)
    tile_B = tl.where(is_used_B, low_B, -1)
    tl.store(program_tiles + program_B, tile_B, mask=program_B < num_programs)
