"""Norms and the gated activation, as one Triton kernel each.

Used by `rollout.backends.cuda.ops`. `rollout.backends.cuda.sampling` imports `with_unit_stride`.
Computed in float32 and rounded where ReferenceOps rounds. Shape letters: R rows, D features of a
row, N features of one half.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

SILU_BLOCK = 1024
_FEATURES_PER_WARP = 512
_MAX_WARPS = 16


@triton.jit
def rms_norm_kernel(
    out_ptr,
    x_ptr,
    weight_ptr,
    num_heads,
    num_features,
    token_stride,
    head_stride,
    eps,
    BLOCK: tl.constexpr,
    ROUNDS_FIRST: tl.constexpr,
):
    """Store the RMS norm of one row, which is one head of one token. `out` is contiguous."""
    row = tl.program_id(0)
    offsets_D = tl.arange(0, BLOCK)
    mask_D = offsets_D < num_features
    token, head = (row // num_heads).to(tl.int64), (row % num_heads).to(tl.int64)
    x_row_ptr = x_ptr + token * token_stride + head * head_stride
    x_D = tl.load(x_row_ptr + offsets_D, mask=mask_D, other=0.0).to(tl.float32)
    scaled_D = _scaled(x_D, num_features, eps)
    if ROUNDS_FIRST:
        scaled_D = scaled_D.to(out_ptr.dtype.element_ty).to(tl.float32)
    normed_D = scaled_D * _load_weight(weight_ptr, offsets_D, mask_D)
    _store_row(out_ptr, row, num_features, normed_D, offsets_D, mask_D)


@triton.jit
def add_rms_norm_kernel(
    out_ptr,
    total_ptr,
    x_ptr,
    residual_ptr,
    weight_ptr,
    num_features,
    x_stride,
    residual_stride,
    eps,
    BLOCK: tl.constexpr,
    ROUNDS_FIRST: tl.constexpr,
):
    """Store the sum of one row of x and residual, and the sum's RMS norm. `out` and `total` are
    contiguous."""
    row = tl.program_id(0)
    offsets_D = tl.arange(0, BLOCK)
    mask_D = offsets_D < num_features
    x_row_ptr = x_ptr + row.to(tl.int64) * x_stride
    residual_row_ptr = residual_ptr + row.to(tl.int64) * residual_stride
    x_D = tl.load(x_row_ptr + offsets_D, mask=mask_D, other=0.0).to(tl.float32)
    residual_D = tl.load(residual_row_ptr + offsets_D, mask=mask_D, other=0.0).to(tl.float32)
    # The sum is rounded before it is normed, so that the norm belongs to the stored sum.
    total_D = (x_D + residual_D).to(total_ptr.dtype.element_ty)
    _store_row(total_ptr, row, num_features, total_D, offsets_D, mask_D)
    total_D = total_D.to(tl.float32)
    scaled_D = _scaled(total_D, num_features, eps)
    if ROUNDS_FIRST:
        scaled_D = scaled_D.to(out_ptr.dtype.element_ty).to(tl.float32)
    normed_D = scaled_D * _load_weight(weight_ptr, offsets_D, mask_D)
    _store_row(out_ptr, row, num_features, normed_D, offsets_D, mask_D)


@triton.jit
def _scaled(x_D, num_features, eps):
    """Return x / sqrt(mean(x^2) + eps). `x_D` is zero where masked."""
    return x_D * tl.rsqrt(tl.sum(x_D * x_D) / num_features + eps)


@triton.jit
def _load_weight(weight_ptr, offsets_D, mask_D):
    return tl.load(weight_ptr + offsets_D, mask=mask_D, other=0.0).to(tl.float32)


@triton.jit
def _store_row(out_ptr, row, num_features, values_D, offsets_D, mask_D):
    row_ptr = out_ptr + row.to(tl.int64) * num_features
    tl.store(row_ptr + offsets_D, values_D.to(out_ptr.dtype.element_ty), mask=mask_D)


@triton.jit
def silu_mul_kernel(out_ptr, gate_up_ptr, num_features, row_stride, BLOCK: tl.constexpr):
    """Store silu(gate) * up for BLOCK features of one row."""
    row = tl.program_id(0)
    offsets_N = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask_N = offsets_N < num_features
    gate_ptr = gate_up_ptr + row.to(tl.int64) * row_stride
    gate_N = tl.load(gate_ptr + offsets_N, mask=mask_N, other=0.0).to(tl.float32)
    up_N = tl.load(gate_ptr + num_features + offsets_N, mask=mask_N, other=0.0).to(tl.float32)
    # Trainers also round the activation before the product.
    activated_N = (gate_N / (1.0 + tl.exp(-gate_N))).to(out_ptr.dtype.element_ty).to(tl.float32)
    _store_row(out_ptr, row, num_features, activated_N * up_N, offsets_N, mask_N)


def rms_norm(x: Tensor, weight_D: Tensor, eps: float, *, rounds_first: bool = False) -> Tensor:
    """Return x / sqrt(mean(x^2) + eps) * weight over the last dim, contiguous, in x's dtype.

    `x` can be a view [T, H, D] with gaps between its rows. `rounds_first` also rounds to x's dtype
    before the product with the weight, as most trainers' modules do. Source: Zhang and Sennrich
    2019, "Root mean square layer normalization", eq. 4.
    """
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    num_features = x.shape[-1]
    num_rows = out.numel() // num_features
    if not num_rows:
        return out
    x_RHD = with_unit_stride(x if x.dim() == 3 else x.reshape(num_rows, 1, num_features))
    block = triton.next_power_of_2(num_features)
    rms_norm_kernel[(num_rows,)](
        *(out, x_RHD, weight_D, x_RHD.shape[1], num_features, *x_RHD.stride()[:2], eps),
        BLOCK=block,
        ROUNDS_FIRST=rounds_first,
        num_warps=num_warps_of(block),
    )
    return out


def add_rms_norm(
    x: Tensor, residual: Tensor, weight_D: Tensor, eps: float, *, rounds_first: bool = False
) -> tuple[Tensor, Tensor]:
    """Return (rms_norm(x + residual), x + residual), both contiguous and in x's dtype. The sum is
    rounded before it is normed. The arguments are not changed."""
    out, total = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for _ in range(2))
    num_features = x.shape[-1]
    num_rows = out.numel() // num_features
    if not num_rows:
        return out, total
    x_RD = with_unit_stride(x.reshape(num_rows, num_features))
    residual_RD = with_unit_stride(residual.reshape(num_rows, num_features))
    block = triton.next_power_of_2(num_features)
    add_rms_norm_kernel[(num_rows,)](
        *(out, total, x_RD, residual_RD, weight_D, num_features),
        *(x_RD.stride(0), residual_RD.stride(0), eps),
        BLOCK=block,
        ROUNDS_FIRST=rounds_first,
        num_warps=num_warps_of(block),
    )
    return out, total


def silu_mul(gate_up: Tensor) -> Tensor:
    """Return silu(first half of the last dim) * second half. silu is rounded before the product."""
    num_features = gate_up.shape[-1] // 2
    shape = (*gate_up.shape[:-1], num_features)
    out = torch.empty(shape, dtype=gate_up.dtype, device=gate_up.device)
    num_rows = out.numel() // num_features
    if not num_rows:
        return out
    gate_up_RN = with_unit_stride(gate_up.reshape(num_rows, 2 * num_features))
    silu_mul_kernel[(num_rows, triton.cdiv(num_features, SILU_BLOCK))](
        *(out, gate_up_RN, num_features, gate_up_RN.stride(0)),
        BLOCK=SILU_BLOCK,
    )
    return out


def num_warps_of(block: int) -> int:
    """Return the number of warps for a row of `block` features: one per 512 features, 1 to 16."""
    return min(max(block // _FEATURES_PER_WARP, 1), _MAX_WARPS)


def with_unit_stride(x: Tensor) -> Tensor:
    """Return `x`, or a contiguous copy if its last dim has another stride than 1."""
    return x if x.stride(-1) == 1 else x.contiguous()
