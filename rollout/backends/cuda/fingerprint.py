"""The fingerprint of `rollout.backends.ops.fingerprint`, computed on a GPU.

One pass over a tensor includes the cast. Used by `rollout.backends.cuda.ops`. Shape letters: P
programs, B elements of a program.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from rollout.backends.ops import fingerprint as definition
from rollout.backends.ops.fingerprint import EXPONENT_BITS, Places

BLOCK = 4096
NUM_COLUMNS = tl.constexpr(definition.NUM_COLUMNS)
NUM_WARPS = 8
# By dtype: Triton's dtype, and the integer type that holds its bits.
TYPES = {
    torch.bfloat16: (tl.bfloat16, tl.uint16),
    torch.float16: (tl.float16, tl.uint16),
    torch.float32: (tl.float32, tl.uint32),
    torch.float64: (tl.float64, tl.uint64),
}


@triton.jit
def fingerprint_kernel(
    sums_ptr,
    values_ptr,
    num_values,
    first,
    row_length,
    row_stride,
    IS_PART: tl.constexpr,
    TARGET: tl.constexpr,
    BITS: tl.constexpr,
    EXPONENT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Store (hash, number of non-finite values) of this program's BLOCK elements in its row of
    `sums`."""
    program = tl.program_id(0).to(tl.int64)
    positions_B = program * BLOCK + tl.arange(0, BLOCK)
    mask_B = positions_B < num_values
    values_B = tl.load(values_ptr + positions_B, mask=mask_B, other=0.0)
    if values_ptr.dtype.element_ty != TARGET:
        # torch casts through float32, too.
        values_B = values_B.to(tl.float32).to(TARGET)
    bits_B = values_B.to(BITS, bitcast=True).to(tl.uint64)
    places_B = positions_B
    if IS_PART:
        rows_B = positions_B // row_length
        places_B = first + positions_B + rows_B * (row_stride - row_length)
    products_B = _products(places_B.to(tl.uint64), bits_B, BITS.primitive_bitwidth // 8)
    hashes_B = tl.where(mask_B, products_B.to(tl.int64), 0)
    is_not_finite_B = (bits_B & EXPONENT) == EXPONENT
    tl.store(sums_ptr + program * 2, tl.sum(hashes_B))
    tl.store(sums_ptr + program * 2 + 1, tl.sum(is_not_finite_B.to(tl.int64)))


@triton.jit
def _products(places_B, bits_B, SIZE: tl.constexpr):
    """Return each element's term of the hash, uint64, for elements of SIZE bytes."""
    if SIZE == 8:
        low_B, high_B = bits_B & 0xFFFFFFFF, bits_B >> 32
        return low_B * _keys(2 * places_B) + high_B * _keys(2 * places_B + 1)
    PER_WORD: tl.constexpr = 4 // SIZE
    shifted_B = bits_B << (8 * SIZE * (places_B % PER_WORD))
    return shifted_B * _keys(places_B // PER_WORD)


@triton.jit
def _keys(words_B):
    """Return the keys, uint64, of the words with these indices (see
    `rollout.backends.ops.fingerprint`)."""
    return _odd(2 * (words_B % NUM_COLUMNS)) * _odd(2 * (words_B // NUM_COLUMNS) + 1)


@triton.jit
def _odd(numbers_B):
    """Return SplitMix64's finalizer of numbers * GOLDEN + 1, made odd, uint64."""
    z_B = numbers_B * 0x9E3779B97F4A7C15 + 1
    z_B = (z_B ^ (z_B >> 30)) * 0xBF58476D1CE4E5B9
    z_B = (z_B ^ (z_B >> 27)) * 0x94D049BB133111EB
    return (z_B ^ (z_B >> 31)) | 1


def can_fingerprint(x: Tensor, dtype: torch.dtype) -> bool:
    """Return whether `fingerprint` supports `x` and `dtype`. Both dtypes must be in TYPES, and `x`
    must be on a GPU unless kernels are interpreted."""
    is_interpreted = not isinstance(fingerprint_kernel, triton.JITFunction)
    return (x.is_cuda or is_interpreted) and {x.dtype, dtype} <= TYPES.keys()


def fingerprint(x: Tensor, dtype: torch.dtype, places: Places | None = None) -> Tensor:
    """Return (hash, number of non-finite values) of x.to(dtype), int64 [2] on x's device. The host
    does not wait. `places` has the positions of x's elements in a larger tensor; None if `x` is a
    whole tensor. Takes two launches, and a copy if `x` is not contiguous."""
    x = x.detach().contiguous()
    sums_P2 = torch.empty(triton.cdiv(x.numel(), BLOCK), 2, dtype=torch.int64, device=x.device)
    target, bits = TYPES[dtype]
    # Triton launches on the current device, and a trainer's tensor may be on another one.
    with torch.cuda.device_of(x):
        if x.numel():
            fingerprint_kernel[(len(sums_P2),)](
                *(sums_P2, x, x.numel(), *(places or (0, 1, 1))),
                IS_PART=places is not None,
                TARGET=target,
                BITS=bits,
                EXPONENT=EXPONENT_BITS[dtype],
                BLOCK=BLOCK,
                num_warps=NUM_WARPS,
            )
    return sums_P2.sum(0)
