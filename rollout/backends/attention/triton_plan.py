"""TritonPlan: how a step's attention is cut, found on the device from the rows' lengths.

Decode: the context tiles of all rows and KV heads lie end to end and are cut into equal shares, one
a program. Prefill: query tiles in the order of their contexts, longest first. Grids depend on
shapes alone, so that a captured graph follows the lengths of its replay. Shape letters: R rows, E =
R + 1, P programs, Q query tiles.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from rollout.backends.forward_batch import ForwardBatch

MIN_TILES_PER_PROGRAM = 2  # less work than that does not pay for its partial result
_MIN_TILES: tl.constexpr = tl.constexpr(MIN_TILES_PER_PROGRAM)
BLOCK = 256  # rows, programs or tiles that a program of the plan takes at once
BLOCK_J = 16


class TritonPlan:
    """What all layers of a forward pass share, worked out when the first of them needs it.

    Layers differ in their windows alone: each window has a plan of its own.
    """

    def __init__(self, batch: ForwardBatch) -> None:
        self._query_starts_E, self._context_lens_R = batch.query_starts_E, batch.context_lens_R
        self._num_decode_rows = batch.num_decode_rows
        self._decode: dict[tuple[int | None, ...], tuple[Tensor, Tensor]] = {}
        self._prefill: dict[tuple[int | None, ...], tuple[Tensor, Tensor]] = {}

    def decode(
        self, *, window: int | None, block_n: int, num_kv_heads: int, num_programs: int
    ) -> tuple[Tensor, Tensor]:
        """(where each row's context tiles begin among those of all decode rows, for one KV head
        [E]; the row with which each program begins [P]), int32.
        """
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
        self, *, window: int | None, block_n: int, block_q: int, num_tokens: int
    ) -> tuple[Tensor, Tensor]:
        """(row of each query tile, -1 for those left over; its first token) [Q], int32, the longest
        context first, of the rows after the decode rows. `num_tokens`: tokens of these rows.

        There are as many tiles as any lengths of the rows could need.
        """
        key = window, block_n, block_q, num_tokens
        if key not in self._prefill:
            first_row, device = self._num_decode_rows, self._context_lens_R.device
            num_rows = self._context_lens_R.shape[0] - first_row
            num_tiles = num_tokens // block_q + num_rows
            rows_Q, tokens_Q, lengths_Q, ordered_rows_Q, ordered_tokens_Q = torch.empty(
                (5, num_tiles), dtype=torch.int32, device=device
            )
            grid = (triton.cdiv(num_tiles, BLOCK),)
            query_tiles_kernel[grid](
                *(rows_Q, tokens_Q, lengths_Q, self._query_starts_E, self._context_lens_R),
                *(first_row, first_row + num_rows, block_q, num_tiles, window or 0),
                BLOCK_N=block_n,
                HAS_WINDOW=window is not None,
                BLOCK=BLOCK,
            )
            order_tiles_kernel[grid](
                *(ordered_rows_Q, ordered_tokens_Q, rows_Q, tokens_Q, lengths_Q, num_tiles),
                BLOCK=BLOCK,
                BLOCK_J=BLOCK_J,
            )
            self._prefill[key] = ordered_rows_Q, ordered_tokens_Q
        return self._prefill[key]


@triton.jit
def share_of(program, num_programs, num_tiles):
    """Context tiles [start, end) of a program: all have as many, the last ones fewer or none."""
    share = tl.maximum(tl.cdiv(num_tiles, num_programs), _MIN_TILES)
    start = program * share
    return start, tl.minimum(start + share, num_tiles)


@triton.jit(do_not_specialize=["num_rows", "window"])
def tile_starts_kernel(
    tile_starts, context_lens, num_rows, window,
    BLOCK_N: tl.constexpr, HAS_WINDOW: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Running sum of the rows' context tiles, at least one each, by one program."""
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
    """The row of each program's first tile, by bisection; any row for a program without work."""
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
    """Row, first token and context tiles of each query tile; row -1, no tiles, if it is surplus.

    Row r begins with tile start(r) // block_q + r, counted from the first row: that leaves room
    for every row's last, partly filled tile, and is known without the lengths of all rows.
    """
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
    before_B = tl.load(context_lens + low_B) - end_B  # of the row, less the row's first token
    length_B = tl.cdiv(before_B + tl.minimum(token_B + block_q, end_B), BLOCK_N)
    if HAS_WINDOW:
        length_B -= tl.maximum(before_B + token_B - window + 1, 0) // BLOCK_N
    is_here_B = tile_B < num_tiles
    tl.store(tile_rows + tile_B, tl.where(is_tile_B, low_B, -1), mask=is_here_B)
    tl.store(tile_tokens + tile_B, token_B, mask=is_here_B)
    tl.store(tile_lengths + tile_B, tl.where(is_tile_B, length_B, 0), mask=is_here_B)


@triton.jit(do_not_specialize=["num_tiles"])
def order_tiles_kernel(
    ordered_rows, ordered_tokens, tile_rows, tile_tokens, tile_lengths, num_tiles,
    BLOCK: tl.constexpr, BLOCK_J: tl.constexpr,
):  # fmt: skip
    """Tiles by falling length, equal ones as they came: each tile counts those before it."""
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
