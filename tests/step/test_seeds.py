"""Seeds and uniforms: functions of (seed, position) alone, with fixed values."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from rollout.step.seeds import UniformsAhead, mix_seed, uniforms

SEEDS = st.integers(0, 2**64 - 1)
POSITIONS = st.integers(0, 2**31 - 1)

# mix_seed(0, 0) is half of 0xE220A8397B1DCDAF, the first number of SplitMix64 with seed 0.
PINNED_SEEDS = [0, 8147104208329303767, 7384525663493887954, 4428931351899220844]
PINNED_LARGE_SEED = 3775176030075466783
PINNED_UNIFORMS = [
    "0x1.cbd594ba03400p-7",
    "0x1.0d96297014840p-3",
    "0x1.128cc589dede1p-1",
    "0x1.8048737586e34p-2",
]


def draw(seed: int, position: int) -> float:
    seeds = np.array([seed], dtype=np.uint64)
    return float(uniforms(seeds, np.array([position], dtype=np.int32))[0])


def test_mixed_seeds_never_change() -> None:
    assert [mix_seed(0), mix_seed(0, 0), mix_seed(42, 7), mix_seed(42, 3, 1)] == PINNED_SEEDS
    assert mix_seed(2**64 - 1, 2**40) == PINNED_LARGE_SEED


def test_uniforms_never_change() -> None:
    places = [(0, 0), (0, 1), (42, 100), (2**64 - 1, 2**31 - 1)]
    assert [draw(seed, position).hex() for seed, position in places] == PINNED_UNIFORMS


@given(st.lists(st.tuples(SEEDS, POSITIONS), min_size=1, max_size=20), st.randoms())
def test_a_draw_does_not_depend_on_the_batch_around_it(pairs, random) -> None:
    shuffled = random.sample(pairs, len(pairs))
    seeds = np.array([seed for seed, _ in shuffled], dtype=np.uint64)
    positions = np.array([position for _, position in shuffled], dtype=np.int32)
    together = dict(zip(shuffled, uniforms(seeds, positions).tolist(), strict=True))
    assert together == {pair: draw(*pair) for pair in pairs}


@given(SEEDS, POSITIONS)
def test_a_draw_is_in_the_unit_interval(seed: int, position: int) -> None:
    assert 0.0 <= draw(seed, position) < 1.0


@given(SEEDS, st.integers(0, 10**6))
def test_the_type_of_the_position_does_not_matter(seed: int, position: int) -> None:
    seeds = np.array([seed], dtype=np.uint64)
    as_int64 = uniforms(seeds, np.array([position], dtype=np.int64))
    assert float(as_int64[0]) == draw(seed, position)


def test_draws_of_one_request_are_uniform_and_uncorrelated() -> None:
    num = 1 << 16
    u = uniforms(np.zeros(num, dtype=np.uint64), np.arange(num, dtype=np.int32))
    assert_uniform(u)
    assert abs(np.corrcoef(u[:-1], u[1:])[0, 1]) < 0.02


def test_draws_of_neighbouring_seeds_are_uniform_and_uncorrelated() -> None:
    num = 1 << 16
    u = uniforms(np.arange(num, dtype=np.uint64), np.zeros(num, dtype=np.int32))
    assert_uniform(u)
    assert abs(np.corrcoef(u[:-1], u[1:])[0, 1]) < 0.02


def assert_uniform(u: np.ndarray) -> None:
    """Chi-squared over 64 bins: 63 expected, 120 has a probability under 1e-5."""
    counts, _ = np.histogram(u, bins=64, range=(0.0, 1.0))
    expected = len(u) / 64
    assert ((counts - expected) ** 2 / expected).sum() < 120


def test_samples_of_a_batch_get_different_seeds() -> None:
    seeds = [mix_seed(1, prompt, sample) for prompt in range(100) for sample in range(100)]
    assert len(set(seeds)) == len(seeds)


def test_the_order_of_indices_matters() -> None:
    assert mix_seed(1, 2, 3) != mix_seed(1, 3, 2)


@given(st.integers(-(2**63), 2**64 - 1), st.lists(st.integers(0, 2**40), max_size=3))
def test_a_mixed_seed_fits_a_signed_integer(seed: int, indices: list[int]) -> None:
    assert 0 <= mix_seed(seed, *indices) < 2**63


@given(st.lists(st.tuples(SEEDS, st.integers(0, 10**6)), min_size=1, max_size=5))
def test_numbers_drawn_ahead_are_those_of_their_positions(pairs: list[tuple[int, int]]) -> None:
    seeds = np.array([seed for seed, _ in pairs], dtype=np.uint64)
    first = np.array([position for _, position in pairs], dtype=np.int32)
    ahead = UniformsAhead(seeds)
    for step in range(40):
        expected = uniforms(seeds, first + step).tolist()
        assert ahead.at(first + np.int32(step)).tolist() == expected
