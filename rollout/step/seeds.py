"""Random numbers for sampling: a pure function of (request seed, absolute position).

The numbers do not depend on the batch, so a token is the same whatever else runs in its step.
`rollout.worker.batch_builder` draws the numbers of a step. `rollout.engine`, `rollout.apis`,
`rollout.coordinator`, `rollout.serve`, `rollout.testing`, `rollout_verl`, `rollout_vllm` and
`trainer_hooks` derive seeds. `trainer_hooks.prompts` also shuffles prompts with `uniforms`. The
mixer is SplitMix64 (Steele, Lea and Flood 2014, "Fast splittable pseudorandom number generators").
"""

from __future__ import annotations

import logging
import secrets
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from rollout.sampling_params import SamplingParams

_logger = logging.getLogger(__name__)
_GOLDEN = 0x9E3779B97F4A7C15
_GOLDEN_64 = np.uint64(_GOLDEN)
_MASK = (1 << 64) - 1
_NUM_AHEAD = 16  # positions drawn at once, which takes NumPy about as long as one position


def system_seed() -> int:
    """Return a new seed in [0, 2**63) from the operating system's random source."""
    return secrets.randbits(63)


def given_or_drawn(seed: int | None, owner: str) -> int:
    """Return `seed`, or a new `system_seed` if it is None. A new seed is logged with the name
    `owner`."""
    if seed is None:
        seed = system_seed()
        _logger.info("seed=%d was drawn for %s; give it to draw the same tokens again", seed, owner)
    return seed


def mix_seed(seed: int, *indices: int) -> int:
    """Hash `seed` and `indices`, whose order matters, into a seed in [0, 2**63)."""
    state = seed & _MASK
    for index in indices:
        state = _finalize(state + _GOLDEN * ((index & _MASK) + 1))
    return state >> 1


def params_of_sample(
    params: SamplingParams, prompt_index: int, sample_index: int
) -> SamplingParams:
    """Return `params` for one of several samples of a prompt. A seed in `params` is mixed with both
    indices, so that no two samples share random numbers. `params` without a seed are returned
    unchanged."""
    if params.seed is None:
        return params
    return replace(params, seed=mix_seed(params.seed, prompt_index, sample_index))


def _finalize(z: int) -> int:
    z &= _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


def uniforms(seeds: NDArray[np.uint64], positions: NDArray[np.integer]) -> NDArray[np.float64]:
    """Return one number in [0, 1) with 53 random bits for each (seed, position). The two arrays are
    broadcast to one shape."""
    z = seeds + _GOLDEN_64 * (positions.astype(np.uint64) + np.uint64(1))
    z = _finalize_array(_finalize_array(z) ^ _GOLDEN_64)
    return (z >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _finalize_array(z: NDArray[np.uint64]) -> NDArray[np.uint64]:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


class UniformsAhead:
    """Computes the `uniforms` of S samples whose positions grow by one from call to call."""

    def __init__(self, seeds: NDArray[np.uint64]) -> None:
        self._seeds, self._samples = seeds[:, None], np.arange(len(seeds))
        self._num_ahead = 1
        self._num_left = 0

    def at(self, positions: NDArray[np.integer]) -> NDArray[np.float64]:
        """Return the numbers at `positions`, [S]. Each position must be one above the
        previous call's position."""
        if not self._num_left:
            self._start = positions
            self._drawn = uniforms(self._seeds, positions[:, None] + np.arange(self._num_ahead))
            self._num_left, self._num_ahead = self._num_ahead, _NUM_AHEAD
        self._num_left -= 1
        return self._drawn[self._samples, positions - self._start]
