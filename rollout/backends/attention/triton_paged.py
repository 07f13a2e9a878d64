"""TritonPagedAttention: attention over blocks in place, on a GPU, in two or three launches.

A step's launches depend on shapes alone (T tokens, R rows, decode rows, width of the block tables),
never on lengths, so that they may be captured in a graph. Shape letters: T tokens, R rows, H query
heads, G key/value heads, S splits, D head dim.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from rollout.backends.attention.triton_kernels import paged_attention_kernel, reduce_splits_kernel
from rollout.backends.base import CacheSpec
from rollout.backends.forward_batch import PLAIN, AttentionTraits, ForwardBatch, Rotation
from rollout.backends.ops.triton_append import append_kv
from rollout.errors import ConfigError

MAX_SPLITS = 32
MAX_HEAD_DIM = 256
_MIN_TILES_PER_SPLIT = 2  # less work than that does not pay for its partial result


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchChoice:
    """How `paged_attention_kernel` is cut: rows of a query tile, positions of a context tile,
    warps of a program, and how many context tiles are loaded ahead.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


def launch_choice(
    dtype: torch.dtype, head_dim: int, group_size: int, is_decode: bool
) -> LaunchChoice:
    """Tile sizes by reasoning for an H100 and by what compiles for it without spilling registers;
    not tuned on one.

    Decode reads K and V once, and tile rows are mostly padding: 16, the least a tensor core takes,
    or 64 for the few models with larger groups (two sizes, to keep compilations few). One context
    tile is loaded ahead, 32 KiB at head dim 128, which with two programs on a multiprocessor hides
    the latency of memory (about 20 KiB in flight). Prefill is bound by arithmetic: 128 rows. Heads
    wider than 128 halve the context tile, since their sums fill the registers. Float32 has no
    tensor core path at full precision: tiles are small, since each product is unrolled.
    """
    group_rows = triton.next_power_of_2(group_size)
    is_small = is_decode and group_rows <= 16
    if dtype == torch.float32:
        is_wide = head_dim > 64
        if is_small:
            return LaunchChoice(block_m=16, block_n=32, num_warps=8, num_stages=2)
        return LaunchChoice(
            block_m=max(64, group_rows),
            block_n=16 if is_wide else 32,
            num_warps=16 if is_wide else 8,
            num_stages=2,
        )
    is_wide = head_dim > 128
    if is_small:
        return LaunchChoice(block_m=16, block_n=64, num_warps=8 if is_wide else 4, num_stages=3)
    return LaunchChoice(
        block_m=max(64 if is_decode else 128, group_rows),
        block_n=32 if is_wide else 64,
        num_warps=4 if is_decode and not is_wide else 8,
        num_stages=3,
    )


def split_choice(
    num_rows: int, num_kv_heads: int, table_tokens: int, block_n: int, num_multiprocessors: int
) -> int:
    """Splits of each decode row's context: enough that every multiprocessor has two programs, but
    no fewer than two context tiles each in the longest row; a power of two, at most MAX_SPLITS.
    """
    wanted = 2 * num_multiprocessors / (num_rows * num_kv_heads)
    useful = table_tokens / (block_n * _MIN_TILES_PER_SPLIT)
    exponent = int(math.log2(max(1.0, min(wanted, useful, MAX_SPLITS))))
    return 1 << exponent


class TritonPagedAttention:
    """Implements `AttentionBackend` with Triton; a head of K or V within a block is contiguous."""

    def __init__(self, *, num_multiprocessors: int = 132, num_splits: int | None = None) -> None:
        """`num_splits`, a power of two up to MAX_SPLITS, overrides `split_choice`; for tests."""
        self._num_multiprocessors = num_multiprocessors
        self._num_splits = num_splits

    def cache_shape(self, spec: CacheSpec, num_blocks: int) -> tuple[int, ...]:
        """[num_blocks, 2, G, block_size, D]. Raises ConfigError for heads that the kernels are not
        made for.
        """
        if spec.value_dim is not None or spec.head_dim > MAX_HEAD_DIM:
            raise ConfigError(
                f"the GPU's attention has no kernel for head_dim={spec.head_dim}, value_dim="
                f"{spec.value_dim}: it has V of its own and at most {MAX_HEAD_DIM} dims; use "
                "device='cpu' for latent attention and wider heads"
            )
        return (num_blocks, 2, spec.num_kv_heads, spec.block_size, spec.head_dim)

    def begin(self, batch: ForwardBatch) -> ForwardBatch:
        """The batch as it is: what its launches depend on are the shapes of a layer."""
        return batch

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
        """Norm, rotate and write as `rotation` and `slots_T` say, then attend causally as `traits`
        say; [T, H, D].

        Reads no host array of the batch. The output of tokens beyond the last row is undefined.
        """
        cache = batch.kv[layer]
        q_THD = append_kv(q_THD, k_TGD, v_TGD, cache, batch.slots_T, rotation)
        out_THD = torch.empty_like(q_THD)
        if batch.num_decode_rows:
            self._decode(out_THD, q_THD, cache, batch, traits)
        if batch.context_lens_R.shape[0] > batch.num_decode_rows:
            self._prefill(out_THD, q_THD, cache, batch, traits)
        return out_THD

    def _decode(
        self,
        out_THD: Tensor,
        q_THD: Tensor,
        cache: Tensor,
        batch: ForwardBatch,
        traits: AttentionTraits,
    ) -> None:
        """One token per tile; the context in splits, whose averages are then reduced."""
        num_rows, num_heads, head_dim = batch.num_decode_rows, *q_THD.shape[1:]
        num_kv_heads, block_size = cache.shape[2:4]
        choice = launch_choice(q_THD.dtype, head_dim, num_heads // num_kv_heads, True)
        table_tokens = batch.block_tables_RM.shape[1] * block_size
        num_splits = self._num_splits or split_choice(
            num_rows,
            num_kv_heads,
            min(table_tokens, traits.window or table_tokens),
            choice.block_n,
            self._num_multiprocessors,
        )
        num_parts = num_rows * num_heads * num_splits if num_splits > 1 else 0
        partial_out = torch.empty((num_parts, head_dim), dtype=torch.float32, device=q_THD.device)
        partial_lse = torch.empty(num_parts, dtype=torch.float32, device=q_THD.device)
        grid = (num_rows, num_kv_heads, num_splits)
        partials = (partial_out, partial_lse)
        _launch(grid, choice, out_THD, partials, q_THD, cache, batch, traits, is_decode=True)
        if num_splits > 1:
            reduce_splits_kernel[(num_rows * num_heads,)](
                *(out_THD, partial_out, partial_lse, num_splits),
                HEAD_DIM=head_dim,
                BLOCK_D=_padded(head_dim),
                BLOCK_S=MAX_SPLITS,
            )

    def _prefill(
        self,
        out_THD: Tensor,
        q_THD: Tensor,
        cache: Tensor,
        batch: ForwardBatch,
        traits: AttentionTraits,
    ) -> None:
        """As many tiles as any lengths of the rows could need; those left over end at once."""
        num_tokens, num_heads, head_dim = q_THD.shape
        num_kv_heads = cache.shape[2]
        group_size = num_heads // num_kv_heads
        choice = launch_choice(q_THD.dtype, head_dim, group_size, False)
        num_rows = batch.context_lens_R.shape[0] - batch.num_decode_rows
        num_prefill_tokens = num_tokens - batch.num_decode_rows
        num_tiles = num_prefill_tokens // (choice.block_m // group_size) + num_rows
        no_partials = torch.empty((2, 0), dtype=torch.float32, device=q_THD.device).unbind()
        grid = (num_tiles, num_kv_heads, 1)
        _launch(grid, choice, out_THD, no_partials, q_THD, cache, batch, traits, is_decode=False)


def _launch(
    grid: tuple[int, int, int],
    choice: LaunchChoice,
    out_THD: Tensor,
    partials: tuple[Tensor, ...],
    q_THD: Tensor,
    cache: Tensor,
    batch: ForwardBatch,
    traits: AttentionTraits,
    *,
    is_decode: bool,
) -> None:
    """paged_attention_kernel over the batch's decode rows, or over the others."""
    _, num_heads, head_dim = q_THD.shape
    paged_attention_kernel[grid](
        *(out_THD, *partials, q_THD, cache),
        *(batch.block_tables_RM, batch.query_starts_E, batch.context_lens_R, traits.sinks_H),
        *(cache.stride(0), batch.block_tables_RM.stride(0)),
        *(0 if is_decode else batch.num_decode_rows, batch.context_lens_R.shape[0]),
        *(num_heads, num_heads // cache.shape[2], cache.shape[3].bit_length() - 1, grid[2]),
        traits.scale_of(head_dim) * math.log2(math.e),
        *(traits.window or 0, (traits.softcap or 0.0) * math.log2(math.e)),
        HEAD_DIM=head_dim,
        BLOCK_D=_padded(head_dim),
        BLOCK_M=choice.block_m,
        BLOCK_N=choice.block_n,
        IS_DECODE=is_decode,
        HAS_WINDOW=traits.window is not None,
        HAS_SOFTCAP=traits.softcap is not None,
        num_warps=choice.num_warps,
        num_stages=choice.num_stages,
    )


def _padded(head_dim: int) -> int:
    """A power of two of at least 16, the least depth of a matrix product."""
    padded: int = triton.next_power_of_2(head_dim)
    return max(16, padded)
