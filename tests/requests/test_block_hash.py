"""compute_block_hashes_batched, against checked vectors and unbounded integers."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rollout.errors import ConfigError
from rollout.requests import HASH_PRIME, compute_block_hashes_batched


def wrapped(value: int) -> int:
    """`value` as a two's-complement int64."""
    return (value + 2**63) % 2**64 - 2**63


def hashes_by_definition(tokens: list[int], block_size: int) -> list[int]:
    """The formula, term by term."""
    hashes, parent = [], 0
    for start in range(0, len(tokens) - block_size + 1, block_size):
        block = tokens[start : start + block_size]
        powers = [wrapped(31**i) % HASH_PRIME for i in range(block_size)]
        total = wrapped(sum(t * p for t, p in zip(block, powers, strict=True))) % HASH_PRIME
        parent = (parent * 31 + total) % HASH_PRIME + 1
        hashes.append(parent)
    return hashes


@pytest.mark.parametrize(
    ("tokens", "block_size", "hashes"),
    [
        (torch.arange(10), 4, [91327, 3045600]),
        (torch.zeros(8, dtype=torch.int64), 4, [1, 32]),
        (torch.arange(512), 256, [1437383680953588069, 1973170499901105334]),
        ([31, 0, 0, 0], 4, [32]),
        ([0, 1, 0, 0], 4, [32]),
        ([1, 2, 3], 4, []),
        ([], 4, []),
    ],
)
def test_hashes_match_the_checked_vectors(tokens, block_size, hashes):
    assert compute_block_hashes_batched(tokens, block_size) == hashes


@given(st.lists(st.integers(0, 2**31), max_size=200), st.integers(1, 80))
def test_hashes_match_the_definition(tokens, block_size):
    hashes = compute_block_hashes_batched(tokens, block_size)
    assert hashes == hashes_by_definition(tokens, block_size)
    assert all(1 <= block_hash <= HASH_PRIME for block_hash in hashes)


def test_hashes_of_a_prefix_are_a_prefix_of_the_hashes():
    tokens = torch.arange(100)
    assert compute_block_hashes_batched(tokens, 8)[:5] == compute_block_hashes_batched(
        tokens[:43], 8
    )


def test_dtype_of_the_tokens_does_not_matter():
    tokens = torch.arange(512, dtype=torch.int32)
    assert compute_block_hashes_batched(tokens, 256) == [1437383680953588069, 1973170499901105334]


def test_block_size_below_one_raises():
    with pytest.raises(ConfigError, match="block_size=0"):
        compute_block_hashes_batched([1], 0)
