"""KVCacheManager: allocation of blocks and rows, and copies on write."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout.blocks.kv_cache_manager import BlockTable, KVCacheManager


def manager(num_blocks: int = 6, block_size: int = 4) -> KVCacheManager:
    return KVCacheManager(num_blocks=num_blocks, block_size=block_size, num_rows=2)


def forked(blocks: KVCacheManager, parent: BlockTable) -> BlockTable:
    child = BlockTable()
    blocks.fork(parent, child)
    return child


def test_tokens_are_rounded_up_to_blocks() -> None:
    assert [manager().blocks_for(n) for n in (0, 1, 4, 5, 8, 9)] == [0, 1, 1, 2, 2, 3]


def test_allocate_appends_only_the_blocks_that_are_missing() -> None:
    blocks = manager()
    table = BlockTable()
    assert blocks.allocate(table, 0, 5) == []
    assert table.blocks == [1, 2]
    assert blocks.allocate(table, 5, 8) == []
    assert table.blocks == [1, 2]
    assert blocks.allocate(table, 8, 9) == []
    assert table.blocks == [1, 2, 3]


def test_allocate_is_all_or_nothing() -> None:
    blocks = manager(num_blocks=3)
    table = BlockTable()
    blocks.allocate(table, 0, 6)
    assert blocks.allocate(table, 6, 17) is None
    assert table.blocks == [1, 2]
    assert blocks.num_free_blocks == 1


def test_allocate_of_a_copy_and_a_block_with_one_free_changes_nothing() -> None:
    blocks = manager(num_blocks=3)
    table = BlockTable()
    blocks.allocate(table, 0, 6)
    child = forked(blocks, table)
    assert blocks.allocate(child, 6, 9) is None
    assert child.blocks == table.blocks == [1, 2]
    assert blocks.allocate(child, 6, 8) == [(2, 3)]


def test_whole_pool_can_be_allocated() -> None:
    blocks = manager(num_blocks=3, block_size=2)
    table = BlockTable()
    assert blocks.allocate(table, 0, 6) == []
    assert blocks.num_free_blocks == 0


def test_fork_shares_all_blocks_and_takes_none() -> None:
    blocks = manager()
    table = BlockTable()
    blocks.allocate(table, 0, 8)
    child = forked(blocks, table)
    assert child.blocks == table.blocks
    assert child.blocks is not table.blocks
    assert blocks.num_used_blocks == 2


def test_first_writer_into_a_shared_block_copies_and_the_last_writes_in_place() -> None:
    blocks = manager()
    parent = BlockTable()
    blocks.allocate(parent, 0, 6)
    first, second = forked(blocks, parent), forked(blocks, parent)
    assert blocks.allocate(parent, 6, 7) == [(2, 3)]
    assert blocks.allocate(first, 6, 7) == [(2, 4)]
    assert blocks.allocate(second, 6, 7) == []
    assert (parent.blocks, first.blocks, second.blocks) == ([1, 3], [1, 4], [1, 2])


def test_full_shared_blocks_before_the_written_position_stay_shared() -> None:
    blocks = manager()
    parent = BlockTable()
    blocks.allocate(parent, 0, 8)
    child = forked(blocks, parent)
    assert blocks.allocate(child, 8, 9) == []
    assert blocks.allocate(parent, 8, 9) == []
    assert (parent.blocks, child.blocks) == ([1, 2, 4], [1, 2, 3])


def test_shared_block_is_free_only_when_the_last_holder_leaves() -> None:
    blocks = manager()
    parent = BlockTable()
    blocks.allocate(parent, 0, 4)
    child = forked(blocks, parent)
    blocks.free(parent)
    assert parent.blocks == []
    assert blocks.used_blocks() == [1]
    assert blocks.allocate(child, 3, 4) == []
    blocks.free(child)
    assert blocks.used_blocks() == []


def test_the_block_that_was_freed_last_is_reused_first() -> None:
    blocks = manager(num_blocks=6, block_size=1)
    first, second, third = BlockTable(), BlockTable(), BlockTable()
    blocks.allocate(first, 0, 2)
    blocks.allocate(second, 0, 2)
    blocks.free(first)
    blocks.free(second)
    blocks.allocate(third, 0, 5)
    assert third.blocks == [3, 4, 1, 2, 5]


def test_a_repeated_load_takes_the_same_blocks() -> None:
    blocks = manager(num_blocks=100, block_size=1)
    taken = set()
    for _ in range(20):
        tables = [BlockTable() for _ in range(3)]
        for table in tables:
            blocks.allocate(table, 0, 3)
            taken |= set(table.blocks)
        for table in tables:
            blocks.free(table)
    assert len(taken) == 9


def test_block_freed_twice_is_refused() -> None:
    blocks, table = manager(), BlockTable()
    blocks.allocate(table, 0, 4)
    again = BlockTable(blocks=list(table.blocks))
    blocks.free(table)
    with pytest.raises(AssertionError, match="block 1 is freed twice"):
        blocks.free(again)


def test_a_block_counts_its_users() -> None:
    blocks, table = manager(), BlockTable()
    blocks.allocate(table, 0, 4)
    child = forked(blocks, table)
    assert blocks.num_users(1) == 2
    blocks.free(table)
    blocks.free(child)
    assert blocks.num_users(1) == 0


def test_lowest_free_row_is_taken_and_row_0_never() -> None:
    blocks, tables = manager(), [BlockTable(), BlockTable()]
    for table in tables:
        blocks.allocate_row(table)
    assert [table.row for table in tables] == [1, 2]
    assert blocks.num_free_rows == 0
    blocks.free_row(tables[0])
    assert tables[0].row == 0
    blocks.allocate_row(tables[0])
    assert tables[0].row == 1


def test_row_freed_twice_is_refused() -> None:
    blocks, table = manager(), BlockTable()
    blocks.allocate_row(table)
    again = BlockTable(row=table.row)
    blocks.free_row(table)
    with pytest.raises(AssertionError, match="row 1 is freed twice"):
        blocks.free_row(again)
    assert blocks.num_free_rows == 2


@given(st.integers(1, 8), st.lists(st.integers(0, 8), max_size=50))
def test_any_history_of_rows_takes_the_lowest_free_one(num_rows: int, choices: list[int]) -> None:
    blocks = KVCacheManager(num_blocks=1, block_size=1, num_rows=num_rows)
    taken: dict[int, BlockTable] = {}
    for choice in choices:
        if choice in taken:
            blocks.free_row(taken.pop(choice))
        elif blocks.num_free_rows:
            table = BlockTable()
            blocks.allocate_row(table)
            assert table.row == min(set(range(1, num_rows + 1)) - set(taken))
            taken[table.row] = table
        assert blocks.num_free_rows == num_rows - len(taken)


@st.composite
def moves(draw: st.DrawFn) -> list[tuple[str, int, int]]:
    kinds = st.sampled_from(("grow", "grow", "grow", "fork", "release"))
    return draw(st.lists(st.tuples(kinds, st.integers(0, 5), st.integers(1, 7)), max_size=60))


@given(st.integers(1, 10), st.integers(1, 4), moves())
def test_writable_blocks_have_one_holder_and_none_is_lost(
    num_blocks: int, block_size: int, work: list[tuple[str, int, int]]
) -> None:
    blocks = KVCacheManager(num_blocks=num_blocks, block_size=block_size, num_rows=1)
    tables = [BlockTable()]
    lengths = [0]
    for kind, choice, count in work:
        index = choice % len(tables)
        if kind == "grow":
            _grow(blocks, tables, lengths, index, count)
        elif kind == "fork":
            tables.append(forked(blocks, tables[index]))
            lengths.append(lengths[index])
        else:
            blocks.free(tables[index])
            lengths[index] = 0
        held = {block for table in tables for block in table.blocks}
        assert held <= set(range(1, num_blocks + 1))
        assert blocks.used_blocks() == sorted(held)
        assert blocks.num_free_blocks + len(held) == num_blocks == blocks.num_blocks
        assert all(len(set(table.blocks)) == len(table.blocks) for table in tables)


def _grow(
    blocks: KVCacheManager, tables: list[BlockTable], lengths: list[int], index: int, count: int
) -> None:
    table, start = tables[index], lengths[index]
    end = start + count
    before, free_before = list(table.blocks), blocks.num_free_blocks
    holders = Counter(block for each in tables for block in each.blocks)
    first = start // blocks.block_size
    shared = [block for block in table.blocks[first:] if holders[block] > 1]
    needed = len(shared) + blocks.blocks_for(end) - len(table.blocks)
    copies = blocks.allocate(table, start, end)
    if copies is None:
        assert needed > free_before
        assert (table.blocks, blocks.num_free_blocks) == (before, free_before)
        return
    assert needed <= free_before
    assert [source for source, _ in copies] == shared
    assert table.blocks[:first] == before[:first]
    assert len(table.blocks) == blocks.blocks_for(end)
    holders = Counter(block for each in tables for block in each.blocks)
    assert all(holders[block] == 1 for block in table.blocks[first:])
    lengths[index] = end
