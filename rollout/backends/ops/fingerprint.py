"""A tensor's fingerprint: a hash of its elements' bits, and how many of them are not finite.

With b_i the bits of element i of x.to(dtype) as an unsigned integer, the hash is the sum of
mix(i * GOLDEN + b_i + 1) modulo 2^64. A sum has no order, so every device may take the elements as
it likes; each counts with its position, so two that are swapped show. `mix` is the finalizer of
SplitMix64 (Steele, Lea and Flood 2014), as in rollout/step/seeds.py. Equal numbers give equal
fingerprints on every device; of a NaN that is cast each device makes a NaN of its own. The
fingerprints of the parts of a tensor, each at its places in it, add up to that of the tensor.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

# Of a float these bits are all set in NaN and infinity, and in nothing else.
EXPONENT_BITS = {
    torch.bfloat16: 0x7F80,
    torch.float16: 0x7C00,
    torch.float32: 0x7F80_0000,
    torch.float64: 0x7FF0_0000_0000_0000,
}
_GOLDEN = 0x9E3779B97F4A7C15
_SIGNED = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes
_CHUNK = 1 << 16  # elements: what is computed of them stays in a core's cache


class Places(NamedTuple):
    """Where the elements of a part of a tensor stand in the tensor, both in row-major order.

    Of the part, element k stands at first + (k // row_length) * row_stride + k % row_length.
    """

    first: int
    row_length: int
    row_stride: int


def fingerprint(x: Tensor, dtype: torch.dtype, places: Places | None = None) -> Tensor:
    """(hash, number of non-finite values) of x.to(dtype), int64 [2] on x's device.

    `places`: those of the elements of `x`; None if it is no part of another tensor. The memory it
    needs does not grow with `x`, unless `x` has gaps. Raises KeyError for a float `dtype` that
    EXPONENT_BITS lacks.
    """
    total = torch.zeros(2, dtype=torch.int64, device=x.device)
    for position, values in chunks(x, dtype, _CHUNK):
        bits = values.view(_SIGNED[dtype.itemsize]).to(torch.int64)
        if dtype.itemsize < 8:
            bits.bitwise_and_((1 << 8 * dtype.itemsize) - 1)
        salts = torch.arange(position, position + len(bits), device=x.device)
        if places is not None:
            rows = salts // places.row_length
            salts += rows * (places.row_stride - places.row_length) + places.first
        salts.mul_(_as_int64(_GOLDEN)).add_(1)
        total[0] += _mix_(salts.add_(bits)).sum()
        if dtype.is_floating_point:
            exponent = EXPONENT_BITS[dtype]
            total[1] += ((bits & exponent) == exponent).sum()
    return total


def chunks(x: Tensor, dtype: torch.dtype, size: int) -> Iterator[tuple[int, Tensor]]:
    """(position of the first, values) of every `size` elements, contiguous and cast to `dtype`."""
    flat = x.detach().reshape(-1)
    for position in range(0, flat.numel(), size):
        # A view of every other column, say, is flat without a copy, but has gaps.
        yield position, flat[position : position + size].to(dtype).contiguous()


def _mix_(z: Tensor) -> Tensor:
    """SplitMix64's finalizer, in place. Torch multiplies modulo 2^64."""
    z.bitwise_xor_(_shifted(z, 30)).mul_(_as_int64(0xBF58476D1CE4E5B9))
    z.bitwise_xor_(_shifted(z, 27)).mul_(_as_int64(0x94D049BB133111EB))
    return z.bitwise_xor_(_shifted(z, 31))


def _shifted(z: Tensor, num_bits: int) -> Tensor:
    """`z` >> num_bits with zeros from the left, where torch repeats the sign."""
    return (z >> num_bits).bitwise_and_((1 << (64 - num_bits)) - 1)


def _as_int64(value: int) -> int:
    """`value` modulo 2^64, as a signed number."""
    return (value + (1 << 63)) % (1 << 64) - (1 << 63)
