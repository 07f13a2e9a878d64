"""BlockManager: who gets which block, when a block is copied, and when nothing happens at all."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from rollout.blocks.block_manager import BlockManager


def manager(num_blocks: int = 6, block_size: int = 4) -> BlockManager:
    return BlockManager(num_blocks=num_blocks, block_size=block_size, num_rows=2)


def test_tokens_are_rounded_up_to_blocks() -> None:
    assert [manager().blocks_for(n) for n in (0, 1, 4, 5, 8, 9)] == [0, 1, 1, 2, 2, 3]


def test_reserve_appends_only_the_blocks_that_are_missing() -> None:
    blocks = manager()
    table: list[int] = []
    assert blocks.reserve(table, 0, 5) == []
    assert table == [1, 2]
    assert blocks.reserve(table, 5, 8) == []
    assert table == [1, 2]
    assert blocks.reserve(table, 8, 9) == []
    assert table == [1, 2, 3]


def test_reserve_is_all_or_nothing() -> None:
    blocks = manager(num_blocks=3)
    table: list[int] = []
    blocks.reserve(table, 0, 6)
    assert blocks.reserve(table, 6, 17) is None
    assert table == [1, 2]
    assert blocks.num_free_blocks == 1


def test_reserve_of_a_copy_and_a_block_with_one_free_changes_nothing() -> None:
    blocks = manager(num_blocks=3)
    table: list[int] = []
    blocks.reserve(table, 0, 6)
    child = blocks.fork(table)
    assert blocks.reserve(child, 6, 9) is None
    assert child == table == [1, 2]
    assert blocks.reserve(child, 6, 8) == [(2, 3)]


def test_whole_pool_can_be_reserved() -> None:
    blocks = manager(num_blocks=3, block_size=2)
    table: list[int] = []
    assert blocks.reserve(table, 0, 6) == []
    assert blocks.num_free_blocks == 0


def test_fork_shares_all_blocks_and_takes_none() -> None:
    blocks = manager()
    table: list[int] = []
    blocks.reserve(table, 0, 8)
    child = blocks.fork(table)
    assert child == table
    assert child is not table
    assert blocks.num_used_blocks == 2


def test_first_writer_into_a_shared_block_copies_and_the_last_writes_in_place() -> None:
    blocks = manager()
    parent: list[int] = []
    blocks.reserve(parent, 0, 6)
    first, second = blocks.fork(parent), blocks.fork(parent)
    assert blocks.reserve(parent, 6, 7) == [(2, 3)]
    assert blocks.reserve(first, 6, 7) == [(2, 4)]
    assert blocks.reserve(second, 6, 7) == []
    assert (parent, first, second) == ([1, 3], [1, 4], [1, 2])


def test_full_shared_blocks_before_the_written_position_stay_shared() -> None:
    blocks = manager()
    parent: list[int] = []
    blocks.reserve(parent, 0, 8)
    child = blocks.fork(parent)
    assert blocks.reserve(child, 8, 9) == []
    assert blocks.reserve(parent, 8, 9) == []
    assert (parent, child) == ([1, 2, 4], [1, 2, 3])


def test_shared_block_is_free_only_when_the_last_holder_leaves() -> None:
    blocks = manager()
    parent: list[int] = []
    blocks.reserve(parent, 0, 4)
    child = blocks.fork(parent)
    blocks.release(parent)
    assert parent == []
    assert blocks.used_blocks() == [1]
    assert blocks.reserve(child, 3, 4) == []
    blocks.release(child)
    assert blocks.used_blocks() == []


def test_released_block_is_reused_last() -> None:
    blocks = manager(num_blocks=3, block_size=1)
    first: list[int] = []
    blocks.reserve(first, 0, 1)
    blocks.release(first)
    second: list[int] = []
    blocks.reserve(second, 0, 3)
    assert second == [2, 3, 1]


def test_lowest_free_row_is_taken_and_row_0_never() -> None:
    blocks = manager()
    assert [blocks.take_row(), blocks.take_row()] == [1, 2]
    assert blocks.num_free_rows == 0
    blocks.release_row(1)
    assert blocks.take_row() == 1


@st.composite
def moves(draw: st.DrawFn) -> list[tuple[str, int, int]]:
    kinds = st.sampled_from(("grow", "grow", "grow", "fork", "release"))
    return draw(st.lists(st.tuples(kinds, st.integers(0, 5), st.integers(1, 7)), max_size=60))


@given(st.integers(1, 10), st.integers(1, 4), moves())
def test_writable_blocks_have_one_holder_and_none_is_lost(
    num_blocks: int, block_size: int, work: list[tuple[str, int, int]]
) -> None:
    blocks = BlockManager(num_blocks=num_blocks, block_size=block_size, num_rows=1)
    tables: list[list[int]] = [[]]
    lengths = [0]
    for kind, choice, count in work:
        index = choice % len(tables)
        if kind == "grow":
            _grow(blocks, tables, lengths, index, count)
        elif kind == "fork":
            tables.append(blocks.fork(tables[index]))
            lengths.append(lengths[index])
        else:
            blocks.release(tables[index])
            lengths[index] = 0
        held = {block for table in tables for block in table}
        assert held <= set(range(1, num_blocks + 1))
        assert blocks.used_blocks() == sorted(held)
        assert blocks.num_free_blocks + len(held) == num_blocks == blocks.num_blocks
        assert all(len(set(table)) == len(table) for table in tables)


def _grow(
    blocks: BlockManager, tables: list[list[int]], lengths: list[int], index: int, count: int
) -> None:
    table, start = tables[index], lengths[index]
    end = start + count
    before, free_before = list(table), blocks.num_free_blocks
    holders = Counter(block for each in tables for block in each)
    first = start // blocks.block_size
    shared = [block for block in table[first:] if holders[block] > 1]
    needed = len(shared) + blocks.blocks_for(end) - len(table)
    copies = blocks.reserve(table, start, end)
    if copies is None:
        assert needed > free_before
        assert (table, blocks.num_free_blocks) == (before, free_before)
        return
    assert needed <= free_before
    assert [source for source, _ in copies] == shared
    assert table[:first] == before[:first]
    assert len(table) == blocks.blocks_for(end)
    holders = Counter(block for each in tables for block in each)
    assert all(holders[block] == 1 for block in table[first:])
    lengths[index] = end
