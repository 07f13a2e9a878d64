"""append_kv: norms and rotates heads and stores keys and values in the paged cache, in one kernel.

TritonPagedAttention in `rollout.backends.cuda.attention` calls it before it attends. Writes the
cache and a contiguous copy of the queries. Shape letters: T tokens, H query heads, G key/value
heads, D head dim. In kernels: R rows (a row is one head of one token), F half of the head dim,
padded to a power of two.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from rollout.backends.forward_batch import Rotation

# 32 heads are 8 KiB at head dim 128 in bfloat16: 16-byte loads keep four warps busy.
ROWS_PER_PROGRAM = 32
NUM_WARPS = 4


def append_kv(
    q_THD: Tensor,
    k_TGD: Tensor,
    v_TGD: Tensor,
    cache: Tensor,
    slots_T: Tensor,
    rotation: Rotation | None = None,
) -> Tensor:
    """Store V and the normed, rotated K at `slots_T` of `cache`. Return Q, normed, rotated and
    contiguous.

    `cache` is [num_blocks, 2, G, block_size, D]. Each block is contiguous, but there can be gaps
    between blocks. Only the last dim of Q, K and V must have stride 1. `rotation` has both norm
    weights or neither. If it is None, Q and K keep their values.
    """
    num_tokens, num_heads, head_dim = q_THD.shape
    num_kv_heads = k_TGD.shape[1]
    q_out_THD = torch.empty(q_THD.shape, dtype=q_THD.dtype, device=q_THD.device)
    num_programs = sum(
        triton.cdiv(num_tokens * heads, ROWS_PER_PROGRAM) for heads in (num_heads, num_kv_heads)
    )
    if num_tokens == 0:
        return q_out_THD
    # The kernel does not read the placeholders: HAS_ROTATION is False then.
    given = rotation or Rotation(slots_T, slots_T)
    append_kv_kernel[(num_programs,)](
        *(q_out_THD, cache, q_THD, k_TGD, v_TGD, slots_T),
        *(given.cos_TD, given.sin_TD, given.q_norm_D, given.k_norm_D, given.eps),
        *(q_THD.stride(0), q_THD.stride(1), k_TGD.stride(0), k_TGD.stride(1)),
        *(v_TGD.stride(0), v_TGD.stride(1), given.cos_TD.stride(0), cache.stride(0)),
        *(num_tokens, num_heads, num_kv_heads, cache.shape[3].bit_length() - 1),
        HEAD_DIM=head_dim,
        BLOCK_F=triton.next_power_of_2(head_dim // 2),
        BLOCK_R=ROWS_PER_PROGRAM,
        HAS_ROTATION=rotation is not None,
        ROUNDS_NORM_FIRST=given.rounds_norm_first,
        ROUNDS_ANGLES=given.rounding != "once",
        ROUNDS_EACH=given.rounding == "each",
        num_warps=NUM_WARPS,
    )
    return q_out_THD


@triton.jit(
    do_not_specialize=["eps", "num_tokens", "num_heads", "num_kv_heads", "block_shift"],
)
def append_kv_kernel(
    q_out, cache, q, k, v, slots,
    cos, sin, q_norm, k_norm, eps,
    q_token_stride, q_head_stride, k_token_stride, k_head_stride,
    v_token_stride, v_head_stride, angle_stride, block_stride,
    num_tokens, num_heads, num_kv_heads, block_shift,
    HEAD_DIM: tl.constexpr, BLOCK_F: tl.constexpr, BLOCK_R: tl.constexpr,
    HAS_ROTATION: tl.constexpr, ROUNDS_NORM_FIRST: tl.constexpr,
    ROUNDS_ANGLES: tl.constexpr, ROUNDS_EACH: tl.constexpr,
):  # fmt: skip
    """Process BLOCK_R rows. The first programs have query heads, and the other programs key and
    value heads. `block_shift` is log2 of the block size."""
    program = tl.program_id(0)
    num_query_programs = tl.cdiv(num_tokens * num_heads, BLOCK_R)
    offsets_R = tl.arange(0, BLOCK_R)
    dims_F = tl.arange(0, BLOCK_F)
    if program < num_query_programs:
        row_R = program * BLOCK_R + offsets_R
        token_R = (row_R // num_heads).to(tl.int64)
        fits_RF = _fits(token_R, dims_F, num_tokens, HEAD_DIM)
        source_R = token_R * q_token_stride + (row_R % num_heads) * q_head_stride
        low_RF, high_RF = _load_halves(q, source_R, dims_F, fits_RF, HEAD_DIM)
        low_RF, high_RF = _norm_and_rotate(
            low_RF, high_RF, q_norm, eps, cos, sin, token_R * angle_stride, dims_F, fits_RF,
            HEAD_DIM, HAS_ROTATION, ROUNDS_NORM_FIRST, ROUNDS_ANGLES, ROUNDS_EACH,
        )  # fmt: skip
        target_R = row_R.to(tl.int64) * HEAD_DIM
        _store_halves(q_out, target_R, low_RF, high_RF, dims_F, fits_RF, HEAD_DIM)
    else:
        row_R = (program - num_query_programs) * BLOCK_R + offsets_R
        token_R = (row_R // num_kv_heads).to(tl.int64)
        head_R = row_R % num_kv_heads
        fits_RF = _fits(token_R, dims_F, num_tokens, HEAD_DIM)
        slot_R = tl.load(slots + token_R, mask=token_R < num_tokens, other=0)
        in_block_R = (head_R << block_shift) + (slot_R & ((1 << block_shift) - 1))
        target_R = (slot_R >> block_shift) * block_stride + in_block_R * HEAD_DIM
        source_R = token_R * k_token_stride + head_R * k_head_stride
        low_RF, high_RF = _load_halves(k, source_R, dims_F, fits_RF, HEAD_DIM)
        low_RF, high_RF = _norm_and_rotate(
            low_RF, high_RF, k_norm, eps, cos, sin, token_R * angle_stride, dims_F, fits_RF,
            HEAD_DIM, HAS_ROTATION, ROUNDS_NORM_FIRST, ROUNDS_ANGLES, ROUNDS_EACH,
        )  # fmt: skip
        _store_halves(cache, target_R, low_RF, high_RF, dims_F, fits_RF, HEAD_DIM)
        source_R = token_R * v_token_stride + head_R * v_head_stride
        low_RF, high_RF = _load_halves(v, source_R, dims_F, fits_RF, HEAD_DIM)
        target_R += (num_kv_heads << block_shift) * HEAD_DIM
        _store_halves(cache, target_R, low_RF, high_RF, dims_F, fits_RF, HEAD_DIM)


@triton.jit
def _norm_and_rotate(
    low_RF, high_RF, weight, eps, cos, sin, angles_R, dims_F, fits_RF,
    HEAD_DIM: tl.constexpr, HAS_ROTATION: tl.constexpr, ROUNDS_NORM_FIRST: tl.constexpr,
    ROUNDS_ANGLES: tl.constexpr, ROUNDS_EACH: tl.constexpr,
):  # fmt: skip
    """Return both halves of heads, RMS-normed if `weight` is not None, then rotated in pairs (i, i
    + D / 2) if HAS_ROTATION."""
    dtype = low_RF.dtype
    low_RF, high_RF = low_RF.to(tl.float32), high_RF.to(tl.float32)
    if weight is not None:
        square_R = tl.sum(low_RF * low_RF, 1) + tl.sum(high_RF * high_RF, 1)
        scale_R1 = tl.rsqrt(square_R / HEAD_DIM + eps)[:, None]
        is_dim_F = dims_F < HEAD_DIM // 2
        low_F = tl.load(weight + dims_F, mask=is_dim_F, other=0.0).to(tl.float32)
        high_F = tl.load(weight + HEAD_DIM // 2 + dims_F, mask=is_dim_F, other=0.0).to(tl.float32)
        low_RF = _rounded(low_RF * scale_R1, dtype, ROUNDS_NORM_FIRST)
        high_RF = _rounded(high_RF * scale_R1, dtype, ROUNDS_NORM_FIRST)
        # Rounded between norm and rotation, as by two operations.
        low_RF = _rounded(low_RF * low_F[None, :], dtype, True)
        high_RF = _rounded(high_RF * high_F[None, :], dtype, True)
    if HAS_ROTATION:
        cos_low_RF, cos_high_RF = _load_halves(cos, angles_R, dims_F, fits_RF, HEAD_DIM)
        sin_low_RF, sin_high_RF = _load_halves(sin, angles_R, dims_F, fits_RF, HEAD_DIM)
        cos_low_RF = _rounded(cos_low_RF, dtype, ROUNDS_ANGLES)
        cos_high_RF = _rounded(cos_high_RF, dtype, ROUNDS_ANGLES)
        sin_low_RF = _rounded(sin_low_RF, dtype, ROUNDS_ANGLES)
        sin_high_RF = _rounded(sin_high_RF, dtype, ROUNDS_ANGLES)
        rotated_low_RF = _rounded(low_RF * cos_low_RF, dtype, ROUNDS_EACH)
        rotated_low_RF -= _rounded(high_RF * sin_low_RF, dtype, ROUNDS_EACH)
        rotated_high_RF = _rounded(high_RF * cos_high_RF, dtype, ROUNDS_EACH)
        rotated_high_RF += _rounded(low_RF * sin_high_RF, dtype, ROUNDS_EACH)
        low_RF, high_RF = rotated_low_RF, rotated_high_RF
    return low_RF.to(dtype), high_RF.to(dtype)


@triton.jit
def _rounded(x_RF, dtype: tl.constexpr, IS_ROUNDED: tl.constexpr):
    """Return float32 values, first rounded to `dtype` if IS_ROUNDED."""
    return x_RF.to(dtype).to(tl.float32) if IS_ROUNDED else x_RF


@triton.jit
def _fits(token_R, dims_F, num_tokens, HEAD_DIM: tl.constexpr):
    return (token_R < num_tokens)[:, None] & (dims_F < HEAD_DIM // 2)[None, :]


@triton.jit
def _load_halves(base, start_R, dims_F, fits_RF, HEAD_DIM: tl.constexpr):
    """Return the two halves of D numbers from each offset `start_R` on."""
    low = base + start_R[:, None] + dims_F[None, :]
    low_RF = tl.load(low, mask=fits_RF, other=0.0)
    return low_RF, tl.load(low + HEAD_DIM // 2, mask=fits_RF, other=0.0)


@triton.jit
def _store_halves(base, start_R, low_RF, high_RF, dims_F, fits_RF, HEAD_DIM: tl.constexpr):
    low = base + start_R[:, None] + dims_F[None, :]
    tl.store(low, low_RF, mask=fits_RF)
    tl.store(low + HEAD_DIM // 2, high_RF, mask=fits_RF)
