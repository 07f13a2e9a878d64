"""The random number of a token: a pure function of (request seed, absolute position).

Nothing here depends on the batch, so a token is the same whatever ran beside it. The mixer is
SplitMix64 (Steele, Lea and Flood 2014, "Fast splittable pseudorandom number generators").
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_GOLDEN = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1


def mix_seed(seed: int, *indices: int) -> int:
    """Return a seed in [0, 2**63) that follows from `seed` and each of `indices` in turn."""
    state = seed & _MASK
    for index in indices:
        state = _finalize(state + _GOLDEN * ((index & _MASK) + 1))
    return state >> 1


def _finalize(z: int) -> int:
    z &= _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


def uniforms(seeds: NDArray[np.uint64], positions: NDArray[np.integer]) -> NDArray[np.float64]:
    """Return one number in [0, 1) per (seed, position), with 53 random bits. All arrays are [S]."""
    z = seeds + np.uint64(_GOLDEN) * (positions.astype(np.uint64) + np.uint64(1))
    z = _finalize_array(_finalize_array(z) ^ np.uint64(_GOLDEN))
    return (z >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _finalize_array(z: NDArray[np.uint64]) -> NDArray[np.uint64]:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))
