"""BlockPool and SlotPool: what is free, and that nothing is given back twice."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout.blocks.block_pool import BlockPool
from rollout.blocks.slot_pool import SlotPool


def test_block_0_is_never_handed_out() -> None:
    pool = BlockPool(3)
    assert [pool.take() for _ in range(3)] == [1, 2, 3]
    assert pool.num_free == 0


def test_block_released_twice_is_refused() -> None:
    pool = BlockPool(2)
    block = pool.take()
    assert pool.remove_user(block)
    with pytest.raises(AssertionError, match="block 1 is released twice"):
        pool.remove_user(block)


def test_idle_block_is_neither_free_nor_in_use_until_it_is_freed() -> None:
    pool = BlockPool(2)
    block = pool.take()
    pool.remove_user(block)
    assert (pool.num_free, pool.used_blocks()) == (1, [])
    pool.free(block)
    assert pool.num_free == 2


def test_block_in_use_cannot_be_freed() -> None:
    pool = BlockPool(2)
    with pytest.raises(AssertionError, match="block 1 is in use"):
        pool.free(pool.take())


def test_block_is_shared_while_it_has_two_users() -> None:
    pool = BlockPool(1)
    block = pool.take()
    assert not pool.is_shared(block)
    pool.add_user(block)
    assert pool.is_shared(block)
    assert not pool.remove_user(block)
    assert not pool.is_shared(block)
    assert pool.used_blocks() == [block]


def test_slot_released_twice_is_refused() -> None:
    pool = SlotPool(2)
    slot = pool.take()
    pool.release(slot)
    with pytest.raises(AssertionError, match="slot 1 is released twice"):
        pool.release(slot)
    assert pool.num_free == 2


@given(st.integers(1, 8), st.lists(st.integers(0, 8), max_size=50))
def test_the_lowest_free_slot_is_taken(num_slots: int, choices: list[int]) -> None:
    pool, taken = SlotPool(num_slots), set[int]()
    for choice in choices:
        if choice in taken:
            pool.release(choice)
            taken.remove(choice)
        elif pool.num_free:
            expected = min(set(range(1, num_slots + 1)) - taken)
            assert pool.take() == expected
            taken.add(expected)
        assert pool.num_free == num_slots - len(taken)
