"""Prefix cache: keys, matches, and the order of eviction."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout import compute_block_hashes_batched
from rollout.blocks.kv_cache_manager import BlockTable, KVCacheManager
from rollout.blocks.prefix_index import ROOT_KEY, PrefixIndex, block_key
from rollout.version_spans import VersionSpans

BLOCK = 4
Text = tuple[int, ...]


def spans(*versions: int) -> VersionSpans:
    return VersionSpans((1, version) for version in versions or (0,) * BLOCK)


def keys_of(text: Text, version: int = 0) -> list[bytes]:
    """One key per letter of `text`: a letter stands for a block of equal tokens."""
    keys, key = [], ROOT_KEY
    for letter in text:
        key = block_key(key, version, [letter] * BLOCK)
        keys.append(key)
    return keys


def tokens_of(text: Text) -> list[int]:
    """The tokens of a text, and one more: the block of a request's last token is never shared."""
    return [letter for letter in text for _ in range(BLOCK)] + [99]


def manager(num_blocks: int = 8, *, lru: bool = True, **options: Any) -> KVCacheManager:
    return KVCacheManager(
        num_blocks=num_blocks,
        block_size=BLOCK,
        num_rows=1,
        enable_prefix_caching=True,
        keeps_unused=lru,
        **options,
    )


def compute(
    blocks: KVCacheManager, text: Text, *, version: int = 0, written: VersionSpans | None = None
) -> BlockTable:
    """A table that shares the first blocks that are known. The others are computed and indexed."""
    table = BlockTable()
    spans = blocks.match_prefix(table, tokens_of(text), version)
    num_tokens = len(text) * BLOCK
    assert blocks.allocate(table, len(spans), num_tokens) is not None
    spans.append(num_tokens - len(spans), version)
    blocks.cache_blocks(table, tokens_of(text), written or spans, version)
    return table


def found(blocks: KVCacheManager, text: Text) -> list[int]:
    return [entry.block for entry in blocks.prefix_index.find(keys_of(text), None)]


def test_a_key_depends_on_parent_version_and_every_token() -> None:
    base = block_key(ROOT_KEY, 0, [1, 2, 3, 4])
    assert base == block_key(ROOT_KEY, 0, [1, 2, 3, 4])
    changed = [[9, 2, 3, 4], [1, 9, 3, 4], [1, 2, 9, 4], [1, 2, 3, 9]]
    others = [
        block_key(base, 0, [1, 2, 3, 4]),
        block_key(ROOT_KEY, 1, [1, 2, 3, 4]),
        block_key(ROOT_KEY, -1, [1, 2, 3, 4]),
        *(block_key(ROOT_KEY, 0, tokens) for tokens in changed),
    ]
    assert len({base, *others}) == 1 + len(others)


def test_texts_with_equal_routing_hashes_have_different_keys() -> None:
    first, second = [31, 0, 0, 0], [0, 1, 0, 0]
    assert compute_block_hashes_batched(first, 4) == compute_block_hashes_batched(second, 4) == [32]
    assert block_key(ROOT_KEY, 0, first) != block_key(ROOT_KEY, 0, second)


def test_the_longest_known_prefix_is_found() -> None:
    blocks = manager()
    table = compute(blocks, (1, 2, 3))
    assert found(blocks, (1, 2, 3, 4)) == table.blocks
    assert found(blocks, (1, 2, 9)) == table.blocks[:2]
    assert found(blocks, (2, 3)) == []


def test_a_match_ends_before_the_block_of_the_last_token() -> None:
    blocks, table = manager(), BlockTable()
    first = compute(blocks, (1, 2))
    spans = blocks.match_prefix(table, tokens_of((1, 2))[:-1], 0)
    assert table.blocks == first.blocks[:1]
    assert spans == VersionSpans([(BLOCK, 0)])
    assert (table.num_shared, table.num_cached) == (1, 1)


def test_without_prefix_caching_nothing_is_matched_or_indexed() -> None:
    blocks = KVCacheManager(num_blocks=8, block_size=BLOCK, num_rows=1)
    first, second = compute(blocks, (1, 2)), compute(blocks, (1, 2))
    assert not set(first.blocks) & set(second.blocks)
    assert blocks.prefix_index.num_entries == 0


def test_a_block_is_found_only_under_the_version_that_wrote_it_and_all_before_it() -> None:
    blocks = manager()
    compute(blocks, (1, 2), version=3)
    assert blocks.match_prefix(BlockTable(), tokens_of((1, 2)), 3) == VersionSpans([(2 * BLOCK, 3)])
    assert blocks.match_prefix(BlockTable(), tokens_of((1, 2)), 4) == VersionSpans()
    mixed = VersionSpans([(BLOCK, 3), (BLOCK - 1, 3), (1, 4)])
    table = compute(blocks, (7, 8), version=4, written=mixed)
    assert (table.num_cached, table.is_cacheable) == (1, False)


def test_with_reuse_across_versions_a_match_says_which_version_wrote_each_position() -> None:
    blocks, table = manager(reuse_across_versions=True, max_age_versions=1), BlockTable()
    mixed = VersionSpans([(BLOCK + 1, 3), (BLOCK - 1, 4)])
    compute(blocks, (1, 2), version=4, written=mixed)
    assert blocks.match_prefix(table, tokens_of((1, 2)), 4) == mixed
    assert blocks.match_prefix(BlockTable(), tokens_of((1, 2)), 5) == VersionSpans()


def test_a_match_ends_at_the_first_block_with_kv_older_than_allowed() -> None:
    index, keys = PrefixIndex(3, keeps_unused=True), keys_of((1, 2, 3))
    for position, written in enumerate((spans(3, 3, 3, 3), spans(3, 3, 2, 3), spans(3, 3, 3, 3))):
        assert index.add(position + 1, keys[position], position or None, written, None)
    assert [len(index.find(keys, oldest)) for oldest in (None, 2, 3, 4)] == [3, 3, 1, 0]


def test_a_block_whose_key_is_taken_stays_unindexed_and_so_do_its_successors() -> None:
    blocks, second = manager(), BlockTable()
    first = compute(blocks, (1,))
    blocks.allocate(second, 0, 2 * BLOCK)
    blocks.cache_blocks(second, tokens_of((1, 2)), VersionSpans([(2 * BLOCK, 0)]), 0)
    assert (second.num_cached, second.is_cacheable) == (0, False)
    assert not blocks.prefix_index.add(
        second.blocks[1], keys_of((1, 2))[1], second.blocks[0], spans(), None
    )
    assert found(blocks, (1, 2)) == first.blocks
    blocks.free(second)
    assert (blocks.prefix_index.num_entries, blocks.num_free_blocks) == (1, 7)


def test_matched_blocks_are_not_evicted_by_the_next_allocation() -> None:
    blocks, table = manager(4), BlockTable()
    blocks.free(compute(blocks, (1, 2, 3)))
    blocks.match_prefix(table, tokens_of((1, 2, 3)), 0)
    assert blocks.allocate(table, 3 * BLOCK, 5 * BLOCK) is None
    assert blocks.allocate(table, 3 * BLOCK, 4 * BLOCK) == []
    assert found(blocks, (1, 2, 3)) == table.blocks[:3]
    assert len(set(table.blocks)) == 4


def test_without_lru_a_block_goes_with_its_last_user() -> None:
    blocks = manager(lru=False)
    first, second = compute(blocks, (1, 2)), compute(blocks, (1, 2, 3))
    blocks.free(first)
    assert len(found(blocks, (1, 2, 3))) == 3
    blocks.free(second)
    assert blocks.prefix_index.num_entries == 0
    assert found(blocks, (1,)) == []
    assert blocks.num_free_blocks == 8


def test_leaves_go_first_and_among_them_the_longest_unused() -> None:
    blocks = manager(6)
    for text in ((1, 2), (3, 4), (1, 5)):
        blocks.free(compute(blocks, text))
    taken = BlockTable()
    orders = []
    for count in range(1, 7):
        before = {key for text in ((1, 2), (3, 4), (1, 5)) for key in _known(blocks, text)}
        blocks.allocate(taken, 0, count * BLOCK)
        after = {key for text in ((1, 2), (3, 4), (1, 5)) for key in _known(blocks, text)}
        orders += sorted(before - after)
    assert orders == [(1, 2), (3, 4), (3,), (1, 5), (1,)]


def _known(blocks: KVCacheManager, text: Text) -> list[Text]:
    return [text[: i + 1] for i in range(len(found(blocks, text)))]


def test_a_block_after_kv_older_than_allowed_is_not_found_either() -> None:
    index, keys = PrefixIndex(2, keeps_unused=True), keys_of((1, 2))
    for position, written in enumerate((spans(1, 1, 1, 1), spans(3, 3, 3, 3))):
        assert index.add(position + 1, keys[position], position or None, written, None)
    assert [len(index.find(keys, oldest)) for oldest in (1, 2)] == [2, 0]


def test_unused_kv_that_is_too_old_loses_its_key_to_younger_kv() -> None:
    options = {"reuse_across_versions": True, "max_age_versions": 0}
    blocks, other = manager(2, **options), manager(2, reuse_across_versions=True)
    for each in (blocks, other):
        each.free(compute(each, (1,), version=1))
    kept = BlockTable()
    other.allocate(kept, 0, BLOCK)
    other.cache_blocks(kept, tokens_of((1,)), VersionSpans([(BLOCK, 2)]), 2)
    assert kept.num_cached == 0, "nothing is too old without a limit"
    young = compute(blocks, (1,), version=2)
    assert [entry.block for entry in blocks.prefix_index.entries()] == young.blocks == [2]
    assert (blocks.prefix_index.num_entries, blocks.num_free_blocks) == (1, 1)
    assert blocks.allocate(young, BLOCK, 2 * BLOCK) == []
    assert young.blocks == [2, 1]


def test_a_new_generation_finds_nothing_of_the_old_one_and_gets_all_its_space() -> None:
    blocks = manager(4)
    live = compute(blocks, (1, 2))
    blocks.free(compute(blocks, (3,)))
    blocks.begin_weights_version()
    assert found(blocks, (1, 2)) == found(blocks, (3,)) == []
    assert (blocks.prefix_index.num_entries, blocks.num_free_blocks) == (0, 2)
    blocks.free(live)
    assert blocks.num_free_blocks == 4
    assert compute(blocks, (5, 6, 7, 8)).blocks == found(blocks, (5, 6, 7, 8))


def test_a_block_with_a_used_successor_is_never_evicted() -> None:
    blocks = manager(3)
    blocks.free(compute(blocks, (1,)))
    table = compute(blocks, (1, 2))
    other = BlockTable()
    assert blocks.allocate(other, 0, 2 * BLOCK) is None
    assert blocks.allocate(other, 0, BLOCK) == []
    assert found(blocks, (1, 2)) == table.blocks


def test_unused_blocks_are_dropped_on_request_and_used_ones_stay() -> None:
    blocks = manager()
    table = compute(blocks, (1, 2))
    blocks.free(compute(blocks, (1, 2, 3)))
    blocks.drop_unused_blocks()
    assert found(blocks, (1, 2, 3)) == table.blocks
    assert (blocks.num_used_blocks, blocks.num_free_blocks) == (2, 6)
    assert blocks.prefix_index.num_entries == 2
    # The dropped block can be computed again, and is kept this time.
    blocks.free(compute(blocks, (1, 2, 3)))
    assert len(found(blocks, (1, 2, 3))) == blocks.prefix_index.num_entries == 3


def test_dropped_blocks_are_taken_first_and_blocks_that_can_be_found_last() -> None:
    blocks, live = manager(4), BlockTable()
    blocks.free(compute(blocks, (1, 2)))
    blocks.allocate(live, 0, BLOCK)
    blocks.begin_weights_version()
    blocks.free(live)
    assert (live.blocks, blocks.free_blocks) == ([], [4, 3])
    kept = compute(blocks, (5,), version=1)
    assert kept.blocks == [2], "the leaf of the dropped prefix"
    blocks.free(kept)
    orders, table = [], BlockTable()
    for count in (1, 2, 3, 4):
        blocks.allocate(table, 0, count * BLOCK)
        orders.append(blocks.prefix_index.num_entries)
    assert (table.blocks, orders) == ([1, 3, 4, 2], [1, 1, 1, 0])


def test_dropping_many_blocks_visits_none_of_them() -> None:
    blocks = manager(1000)
    for drop in (blocks.drop_unused_blocks, blocks.begin_weights_version):
        blocks.free(compute(blocks, tuple(range(1000))))
        assert blocks.prefix_index.num_entries == 1000
        assert num_lines(drop) < 20
        assert blocks.prefix_index.num_entries == 0
        assert found(blocks, (0,)) == []


def num_lines(work: Callable[[], object]) -> int:
    """How many lines of Python run."""
    count, before = 0, sys.gettrace()

    def observe(frame: FrameType, event: str, _: object) -> Any:
        nonlocal count
        count += event == "line"
        return observe

    sys.settrace(observe)
    try:
        work()
    finally:
        sys.settrace(before)
    return count


# ---- any history, against a list of what must be known


@dataclass
class Model:
    """Indexed texts, oldest release first; `live` are the texts of the tables."""

    unused: list[Text] = field(default_factory=list)
    live: list[Text] = field(default_factory=list)

    def known(self) -> set[Text]:
        used = {text[:i] for text in self.live for i in range(1, len(text) + 1)}
        return used | set(self.unused)

    def use(self, text: Text) -> None:
        self.live.append(text)
        self.unused = [t for t in self.unused if t != text[: len(t)]]

    def release(self, text: Text, *, keeps: bool) -> None:
        self.live.remove(text)
        for end in range(len(text), 0, -1):
            if keeps and not any(other[:end] == text[:end] for other in self.live):
                self.unused.append(text[:end])

    def give_up(self) -> None:
        known = self.known()
        leaf = next(t for t in self.unused if not any(k[:-1] == t for k in known))
        self.unused.remove(leaf)


texts = st.lists(st.integers(0, 2), min_size=1, max_size=4).map(tuple)


@pytest.mark.parametrize("lru", [True, False])
@given(st.lists(st.tuples(texts, st.booleans(), st.integers(0, 9)), max_size=40))
def test_any_history_evicts_only_unused_blocks_in_order(
    lru: bool, history: list[tuple[Text, bool, int]]
) -> None:
    blocks, model = manager(7, lru=lru), Model()
    tables: list[tuple[Text, BlockTable]] = []
    for text, releases, choice in history:
        if releases and tables:
            old, table = tables.pop(choice % len(tables))
            blocks.free(table)
            model.release(old, keeps=lru)
        else:
            _enter(blocks, model, tables, text)
        assert _all_known(blocks) == model.known()
        used = len({t[:i] for t in model.live for i in range(1, len(t) + 1)})
        assert blocks.num_used_blocks == used == len(blocks.used_blocks())
        assert blocks.num_free_blocks + used == 7
        assert blocks.prefix_index.num_entries == len(model.known())


def _enter(
    blocks: KVCacheManager, model: Model, tables: list[tuple[Text, BlockTable]], text: Text
) -> None:
    """Match, then allocate what is missing. Only unused blocks are dropped, in their order."""
    known = model.known()
    num_missing = sum(text[:i] not in known for i in range(1, len(text) + 1))
    matched = BlockTable()
    matched_spans = blocks.match_prefix(matched, tokens_of(text), 0)
    assert len(matched.blocks) == len(text) - num_missing
    copies = blocks.allocate(matched, len(matched_spans), len(text) * BLOCK)
    prefix = text[: len(text) - num_missing]
    model.use(prefix)
    in_use = {t[:i] for t in model.live for i in range(1, len(t) + 1)}
    num_kept = len(in_use) + len(model.unused)
    if copies is None:
        assert len(in_use) + num_missing > 7
        blocks.free(matched)
        model.release(prefix, keeps=blocks.prefix_index.keeps_unused)
        return
    assert copies == []
    for _ in range(num_kept + num_missing - 7):
        model.give_up()
    blocks.cache_blocks(matched, tokens_of(text), VersionSpans([(len(text) * BLOCK, 0)]), 0)
    assert matched.num_cached == len(text)
    model.live.remove(prefix)
    model.use(text)
    tables.append((text, matched))


def _all_known(blocks: KVCacheManager) -> set[Text]:
    """Every text that is found, by walking the tree of letters."""
    known: set[Text] = set()
    frontier: list[Text] = [()]
    while frontier:
        text = frontier.pop()
        for letter in range(3):
            longer = (*text, letter)
            if len(longer) <= 4 and len(found(blocks, longer)) == len(longer):
                known.add(longer)
                frontier.append(longer)
    return known
