"""A tensor's fingerprint: a hash of its elements' bits, and the number of non-finite elements.

This file defines the fingerprint and computes it in torch. `rollout.backends.ops.reference` calls
it. `rollout.backends.cpu.ops` and `rollout.backends.cuda.fingerprint` compute the same numbers
faster. `rollout.weights` and `rollout_vllm.executor` compare fingerprints of a weight update's
sender and receivers. `rollout.layers.shard` creates Places.

The bytes of x.to(dtype), in row-major order, are read as little-endian words of 32 bits w_0, w_1,
..., and the last word is filled with zeros. The hash is the sum of w_j key(j) modulo 2^64. There,
key(j) = odd(2 (j % 512)) odd(2 (j // 512) + 1), and odd(n) is SplitMix64's n-th number (Steele, Lea
and Flood 2014), made odd. The products can be added in any order.

A change of one word always changes the hash, since keys are odd. Random changes of several words
leave the hash equal with a probability of 2^-64. The worst case is a change of only the highest
bits of two words, with 2^-32. The hash detects errors, but not an attacker who chooses the bytes.
Equal values give equal fingerprints on every device. The exception is a NaN that a cast makes,
whose bits depend on the device. The fingerprints of a tensor's parts, each with its Places, add up
to the tensor's fingerprint.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

# The exponent bits of a float: all set in NaN and infinity, and in no other number.
EXPONENT_BITS = {
    torch.bfloat16: 0x7F80,
    torch.float16: 0x7C00,
    torch.float32: 0x7F80_0000,
    torch.float64: 0x7FF0_0000_0000_0000,
}
_GOLDEN = 0x9E3779B97F4A7C15
NUM_COLUMNS = 512  # words of a row: the keys of a row's columns stay in a core's first cache
_SIGNED = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes
_CHUNK = 1 << 16  # elements: intermediate results stay in a core's cache


class Places(NamedTuple):
    """Positions of a part's elements in the whole tensor, both in row-major order. Element k of the
    part is at first + (k // row_length) * row_stride + k % row_length."""

    first: int
    row_length: int
    row_stride: int


def fingerprint(x: Tensor, dtype: torch.dtype, places: Places | None = None) -> Tensor:
    """Return (hash, number of non-finite values) of x.to(dtype), int64 [2] on x's device.

    `places` has the positions of x's elements in a larger tensor; None if `x` is a whole tensor.
    Needs constant memory if `x` is contiguous. Raises KeyError for a float `dtype` that
    EXPONENT_BITS lacks.
    """
    total = torch.zeros(2, dtype=torch.int64, device=x.device)
    for position, values in chunks(x, dtype, _CHUNK):
        bits = values.view(_SIGNED[dtype.itemsize]).to(torch.int64)
        positions = torch.arange(position, position + len(bits), device=x.device)
        if places is not None:
            rows = positions // places.row_length
            positions += rows * (places.row_stride - places.row_length) + places.first
        total[0] += _hash(bits, positions, dtype.itemsize)
        if dtype.is_floating_point:
            exponent = EXPONENT_BITS[dtype]
            total[1] += ((bits & exponent) == exponent).sum()
    return total


def chunks(x: Tensor, dtype: torch.dtype, size: int) -> Iterator[tuple[int, Tensor]]:
    """Yield chunks of at most `size` elements, as pairs: the first element's index, and the values,
    cast to `dtype` and contiguous."""
    flat = x.detach().reshape(-1)
    for position in range(0, flat.numel(), size):
        # A view of every other column, say, is flat without a copy, but has gaps.
        yield position, flat[position : position + size].to(dtype).contiguous()


def check_copy(out: Tensor, x: Tensor) -> None:
    """Raise ValueError unless `x` has the shape and dtype of `out`."""
    if (out.shape, out.dtype) != (x.shape, x.dtype):
        raise ValueError(
            f"{x.dtype} {list(x.shape)} cannot be copied to {out.dtype} {list(out.shape)}"
        )


def hashed_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype to which values of `dtype` are cast for hashing: `dtype`, or float32 for
    floats that EXPONENT_BITS lacks."""
    is_known = not dtype.is_floating_point or dtype in EXPONENT_BITS
    return dtype if is_known else torch.float32  # represents all values of 8-bit floats


def _hash(bits: Tensor, positions: Tensor, itemsize: int) -> Tensor:
    """Return the hash of elements of `itemsize` bytes at `positions`. `bits` is int64."""
    if itemsize == 8:
        low, high = bits & 0xFFFF_FFFF, _shifted(bits, 32)
        return (low * _keys(2 * positions)).sum() + (high * _keys(2 * positions + 1)).sum()
    per_word = 4 // itemsize
    bits = bits & ((1 << 8 * itemsize) - 1)
    return ((bits << 8 * itemsize * (positions % per_word)) * _keys(positions // per_word)).sum()


def _keys(words: Tensor) -> Tensor:
    """Return the keys of words with indices `words`."""
    # Torch multiplies modulo 2^64.
    return _odd(2 * (words % NUM_COLUMNS)) * _odd(2 * (words // NUM_COLUMNS) + 1)


def _odd(numbers: Tensor) -> Tensor:
    """Return SplitMix64's finalizer of numbers * GOLDEN + 1, made odd."""
    z = numbers * _as_int64(_GOLDEN) + 1
    z.bitwise_xor_(_shifted(z, 30)).mul_(_as_int64(0xBF58476D1CE4E5B9))
    z.bitwise_xor_(_shifted(z, 27)).mul_(_as_int64(0x94D049BB133111EB))
    return z.bitwise_xor_(_shifted(z, 31)).bitwise_or_(1)


def _shifted(z: Tensor, num_bits: int) -> Tensor:
    """Return `z` >> num_bits as an unsigned shift, which torch lacks."""
    return (z >> num_bits).bitwise_and_((1 << (64 - num_bits)) - 1)


def _as_int64(value: int) -> int:
    """Return `value` modulo 2^64 as a signed number."""
    return (value + (1 << 63)) % (1 << 64) - (1 << 63)
