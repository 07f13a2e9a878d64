"""TritonPagedAttention: attention on a GPU that reads the blocks of the KV cache in place.

Created by `rollout.backends.cuda.backend`. Writes only the KV cache. The kernel launches of a step
depend on shapes (T tokens, R rows, decode rows, width of the block tables) but not on lengths, so
that a graph can capture them. `rollout.backends.cuda.attention_plan` divides the work on the
device. Shape letters: T tokens, R rows, H query heads, G key/value heads, E = rows + 1, P programs,
D head dim.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
from torch import Tensor

from rollout.backends.base import CacheSpec
from rollout.backends.cuda.append import append_kv
from rollout.backends.cuda.attention_kernels import (
    decode_attention_kernel,
    merge_parts_kernel,
    merge_prefill_kernel,
    prefill_attention_kernel,
)
from rollout.backends.cuda.attention_plan import MIN_TILES_PER_PROGRAM, TritonPlan
from rollout.backends.forward_batch import PLAIN, AttentionTraits, ForwardBatch, Rotation
from rollout.errors import ConfigError

MAX_HEAD_DIM = 256
PARTS_PER_MERGE = 16
MERGES_PER_PROGRAM = 8  # merging programs per attention program: they mostly wait for memory


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchChoice:
    """Tile sizes and launch options of an attention kernel.

    `block_m` is the number of rows of a query tile, and `block_n` the number of positions of a
    context tile. `num_stages` is the number of context tiles in flight, as Triton counts them.
    `num_resident` is the number of programs that a multiprocessor runs at once with these options.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    num_resident: int = 1


def launch_choice(
    dtype: torch.dtype, head_dim: int, group_size: int, is_decode: bool
) -> LaunchChoice:
    """Return the launch options for a dtype, head dim and number of query heads per KV head."""
    # Derived for an H100, for which the kernels compile without spilling registers, and not tuned.
    # Decode reads K and V once, and its tile rows are mostly padding: 16 rows, the least that a
    # tensor core takes, or 64 for the few models with larger groups. Two sizes, so that few kernels
    # are compiled. One context tile is loaded ahead: 32 KiB at head dim 128, which with two
    # programs on a multiprocessor hides the latency of memory (about 20 KiB in flight). Prefill is
    # bound by arithmetic, so it has 128 rows. Heads wider than 128 halve the context tile, because
    # their sums fill the registers. Float32 has no tensor core path at full precision; its tiles
    # are small, because each product is unrolled.
    num_resident = 2 if head_dim <= 128 else 1
    if not is_decode:
        num_resident = 2 if head_dim <= 64 and dtype != torch.float32 else 1
    group_rows = triton.next_power_of_2(group_size)
    is_small = is_decode and group_rows <= 16
    if dtype == torch.float32:
        is_wide = head_dim > 64
        if is_small:
            return LaunchChoice(
                block_m=16, block_n=32, num_warps=8, num_stages=2, num_resident=num_resident
            )
        return LaunchChoice(
            block_m=max(64, group_rows),
            block_n=16 if is_wide else 32,
            num_warps=16 if is_wide else 8,
            num_stages=2,
            num_resident=num_resident,
        )
    is_wide = head_dim > 128
    if is_small:
        return LaunchChoice(
            block_m=16,
            block_n=64,
            num_warps=8 if is_wide else 4,
            num_stages=3,
            num_resident=4 if head_dim <= 64 else num_resident,
        )
    return LaunchChoice(
        block_m=max(64 if is_decode else 128, group_rows),
        block_n=32 if is_wide else 64,
        num_warps=4 if is_decode and not is_wide else 8,
        num_stages=3,
        num_resident=num_resident,
    )


def program_choice(
    num_rows: int, num_kv_heads: int, table_tokens: int, block_n: int, num_resident: int
) -> int:
    """Return the number of decode programs: as many as run at once, but no more than have work, and
    at least 1. `table_tokens` is the context length of each row, for an estimate of the work.
    `num_resident` is the number of programs that the device runs at once."""
    num_tiles = num_rows * num_kv_heads * -(-table_tokens // block_n)
    useful = -(-num_tiles // MIN_TILES_PER_PROGRAM)
    return max(1, min(num_resident, useful))


class TritonPagedAttention:
    """`AttentionBackend` with Triton. Within a block, each head's K is contiguous, and so is its
    V."""

    def __init__(self, *, num_multiprocessors: int = 132, num_programs: int | None = None) -> None:
        """`num_multiprocessors` is the device's number. Tests set `num_programs` to the number of
        decode programs, and of prefill programs that run at once."""
        self._num_multiprocessors = num_multiprocessors
        self._num_programs = num_programs

    def cache_shape(self, spec: CacheSpec, num_blocks: int) -> tuple[int, ...]:
        """Return [num_blocks, 2, G, block_size, D]. Raises ConfigError for heads that the kernels
        do not support."""
        if spec.value_dim is not None or spec.head_dim > MAX_HEAD_DIM:
            raise ConfigError(
                f"the GPU's attention has no kernel for head_dim={spec.head_dim}, value_dim="
                f"{spec.value_dim}: head_dim is at most {MAX_HEAD_DIM}, and value_dim (of latent "
                "attention) is None; use device='cpu'"
            )
        return (num_blocks, 2, spec.num_kv_heads, spec.block_size, spec.head_dim)

    def begin(self, batch: ForwardBatch) -> ForwardBatch:
        """Return the batch with a new TritonPlan as its `plan`."""
        return replace(batch, plan=TritonPlan(batch))

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
        """Norm and rotate Q and K, write K and V, and attend causally. Return [T, H, D]. Reads no
        host array of the batch. The output of tokens beyond the last row is undefined."""
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
        """Attend from decode rows and write `out_THD`. Each program gets an equal share of all
        contexts. Partial results of contexts split over several shares are merged afterwards."""
        num_rows, num_heads, head_dim = batch.num_decode_rows, *q_THD.shape[1:]
        num_kv_heads, block_size = cache.shape[2:4]
        group_size = num_heads // num_kv_heads
        choice = launch_choice(q_THD.dtype, head_dim, group_size, True)
        table_tokens = batch.block_tables_RM.shape[1] * block_size
        if traits.window is not None:  # a window may begin within a tile
            table_tokens = min(table_tokens, traits.window + choice.block_n)
        num_resident = self._num_multiprocessors * choice.num_resident
        num_programs = self._num_programs or program_choice(
            num_rows, num_kv_heads, table_tokens, choice.block_n, num_resident
        )
        tile_starts_E, first_rows_P = batch.plan.decode(
            window=traits.window,
            block_n=choice.block_n,
            num_kv_heads=num_kv_heads,
            num_programs=num_programs,
        )
        num_parts = 2 * num_programs * group_size
        partial_out = torch.empty((num_parts, head_dim), dtype=torch.float32, device=q_THD.device)
        partial_lse = torch.empty(num_parts, dtype=torch.float32, device=q_THD.device)
        decode_attention_kernel[(num_programs,)](
            *(out_THD, partial_out, partial_lse, q_THD, cache, batch.block_tables_RM),
            *(batch.context_lens_R, traits.sinks_H, tile_starts_E, first_rows_P),
            *(cache.stride(0), batch.block_tables_RM.stride(0), num_rows, num_kv_heads),
            *(group_size, block_size.bit_length() - 1, *_scores(traits, head_dim)),
            **_constants(choice, head_dim, traits),
        )
        if num_programs > 1:
            merge_parts_kernel[(num_programs, group_size)](
                *(out_THD, partial_out, partial_lse, tile_starts_E, first_rows_P),
                *(num_rows, num_kv_heads, group_size),
                HEAD_DIM=head_dim,
                BLOCK_D=_padded(head_dim),
                BLOCK_S=PARTS_PER_MERGE,
            )

    def _prefill(
        self,
        out_THD: Tensor,
        q_THD: Tensor,
        cache: Tensor,
        batch: ForwardBatch,
        traits: AttentionTraits,
    ) -> None:
        """Attend from prefill rows and write `out_THD`. Each query tile, KV head and part of its
        context has a program."""
        # Programs start in the order of their numbers, the longest first. Surplus programs end at
        # once. Partial results are merged afterwards: at most CUT_PARTS for each program that runs
        # at once.
        num_tokens, num_heads, head_dim = q_THD.shape
        num_kv_heads, block_size = cache.shape[2:4]
        group_size = num_heads // num_kv_heads
        choice = launch_choice(q_THD.dtype, head_dim, group_size, False)
        block_q = choice.block_m // group_size
        num_resident = self._num_programs or self._num_multiprocessors * choice.num_resident
        plan = batch.plan.prefill(
            window=traits.window,
            block_n=choice.block_n,
            block_q=block_q,
            num_tokens=num_tokens - batch.num_decode_rows,
            num_kv_heads=num_kv_heads,
            num_resident=num_resident,
            table_tokens=batch.block_tables_RM.shape[1] * block_size,
        )
        num_parts = plan.num_partials * block_q * group_size
        partial_out = torch.empty((num_parts, head_dim), dtype=torch.float32, device=q_THD.device)
        partial_lse = torch.empty(num_parts, dtype=torch.float32, device=q_THD.device)
        tiles = batch.query_starts_E, plan.rows_Q, plan.tokens_Q, plan.first_programs_F
        prefill_attention_kernel[plan.tiles_P.shape](
            *(out_THD, partial_out, partial_lse, q_THD, cache, batch.block_tables_RM),
            *(batch.context_lens_R, traits.sinks_H, *tiles, plan.tiles_P),
            *(cache.stride(0), batch.block_tables_RM.stride(0), num_kv_heads, group_size),
            *(block_size.bit_length() - 1, *_scores(traits, head_dim)),
            **_constants(choice, head_dim, traits),
        )
        if num_parts:
            merge_prefill_kernel[(MERGES_PER_PROGRAM * num_resident,)](
                *(out_THD, partial_out, partial_lse, *tiles, plan.num_cut),
                *(num_kv_heads, group_size, block_q),
                HEAD_DIM=head_dim,
                BLOCK_D=_padded(head_dim),
                BLOCK_S=PARTS_PER_MERGE,
            )


def _scores(traits: AttentionTraits, head_dim: int) -> tuple[float, int, float]:
    """Return (scale, window, softcap) for kernels. 0 means no window and no softcap."""
    # Kernels take powers of two, so scale and softcap have a factor log2(e).
    scale = traits.scale_of(head_dim) * math.log2(math.e)
    return scale, traits.window or 0, (traits.softcap or 0.0) * math.log2(math.e)


def _constants(choice: LaunchChoice, head_dim: int, traits: AttentionTraits) -> dict[str, Any]:
    """Return the compile-time arguments of an attention kernel."""
    return {
        "HEAD_DIM": head_dim,
        "BLOCK_D": _padded(head_dim),
        "BLOCK_M": choice.block_m,
        "BLOCK_N": choice.block_n,
        "HAS_WINDOW": traits.window is not None,
        "HAS_SOFTCAP": traits.softcap is not None,
        "num_warps": choice.num_warps,
        "num_stages": choice.num_stages,
    }


def _padded(head_dim: int) -> int:
    """Return the head dim padded to a power of two, at least 16 as a matrix product needs."""
    padded: int = triton.next_power_of_2(head_dim)
    return max(16, padded)
