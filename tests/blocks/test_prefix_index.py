"""The prefix index behind the block manager's door: keys, pins, and what is given up first."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout import compute_block_hashes_batched
from rollout.blocks.block_manager import BlockManager
from rollout.blocks.prefix_index import ROOT_KEY, block_key
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


def manager(num_blocks: int = 8, *, lru: bool = True) -> BlockManager:
    return BlockManager(num_blocks=num_blocks, block_size=BLOCK, num_rows=1, keeps_unused=lru)


def compute(blocks: BlockManager, text: Text) -> list[int]:
    """A table whose first blocks are shared if they are known; the others computed and indexed."""
    table = blocks.pin(blocks.find_prefix(keys_of(text)))
    assert blocks.reserve(table, len(table) * BLOCK, len(text) * BLOCK) is not None
    for position, key in enumerate(keys_of(text)):
        if not blocks.index(table, position, key, spans()):
            break
    return table


def found(blocks: BlockManager, text: Text) -> list[int]:
    return [entry.block for entry in blocks.find_prefix(keys_of(text))]


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
    assert found(blocks, (1, 2, 3, 4)) == table
    assert found(blocks, (1, 2, 9)) == table[:2]
    assert found(blocks, (2, 3)) == []


def test_a_match_ends_at_the_first_block_with_kv_older_than_allowed() -> None:
    blocks, table = manager(), []
    keys = keys_of((1, 2, 3))
    blocks.reserve(table, 0, 3 * BLOCK)
    for position, written in enumerate((spans(3, 3, 3, 3), spans(3, 3, 2, 3), spans(3, 3, 3, 3))):
        assert blocks.index(table, position, keys[position], written)
    assert [len(blocks.find_prefix(keys, oldest)) for oldest in (None, 2, 3, 4)] == [3, 3, 1, 0]


def test_a_block_whose_key_is_taken_stays_unindexed_and_so_do_its_successors() -> None:
    blocks = manager()
    first = compute(blocks, (1,))
    second: list[int] = []
    blocks.reserve(second, 0, 2 * BLOCK)
    keys = keys_of((1, 2))
    assert not blocks.index(second, 0, keys[0], spans())
    assert not blocks.index(second, 1, keys[1], spans())
    assert found(blocks, (1, 2)) == first
    blocks.release(second)
    assert (blocks.num_indexed_blocks, blocks.num_free_blocks) == (1, 7)


def test_pinned_matches_are_not_given_away_by_the_allocation_that_follows() -> None:
    blocks = manager(4)
    blocks.release(compute(blocks, (1, 2, 3)))
    table = blocks.pin(blocks.find_prefix(keys_of((1, 2, 3))))
    assert blocks.reserve(table, 3 * BLOCK, 5 * BLOCK) is None
    assert blocks.reserve(table, 3 * BLOCK, 4 * BLOCK) == []
    assert found(blocks, (1, 2, 3)) == table[:3]
    assert len(set(table)) == 4


def test_without_lru_a_block_goes_with_its_last_user() -> None:
    blocks = manager(lru=False)
    first, second = compute(blocks, (1, 2)), compute(blocks, (1, 2, 3))
    blocks.release(first)
    assert len(found(blocks, (1, 2, 3))) == 3
    blocks.release(second)
    assert blocks.num_indexed_blocks == 0
    assert found(blocks, (1,)) == []
    assert blocks.num_free_blocks == 8


def test_leaves_go_first_and_among_them_the_longest_unused() -> None:
    blocks = manager(6)
    for text in ((1, 2), (3, 4), (1, 5)):
        blocks.release(compute(blocks, text))
    taken: list[int] = []
    orders = []
    for count in range(1, 7):
        before = {key for text in ((1, 2), (3, 4), (1, 5)) for key in _known(blocks, text)}
        blocks.reserve(taken, 0, count * BLOCK)
        after = {key for text in ((1, 2), (3, 4), (1, 5)) for key in _known(blocks, text)}
        orders += sorted(before - after)
    assert orders == [(1, 2), (3, 4), (3,), (1, 5), (1,)]


def _known(blocks: BlockManager, text: Text) -> list[Text]:
    return [text[: i + 1] for i in range(len(found(blocks, text)))]


def test_a_block_behind_kv_older_than_allowed_is_not_found_either() -> None:
    blocks, table = manager(), []
    keys = keys_of((1, 2))
    blocks.reserve(table, 0, 2 * BLOCK)
    for position, written in enumerate((spans(1, 1, 1, 1), spans(3, 3, 3, 3))):
        assert blocks.index(table, position, keys[position], written)
    assert [len(blocks.find_prefix(keys, oldest)) for oldest in (1, 2)] == [2, 0]


def test_unused_kv_that_is_too_old_gives_its_key_and_in_time_its_block_to_younger_kv() -> None:
    blocks, old = manager(2), []
    (key,) = keys_of((1,))
    blocks.reserve(old, 0, BLOCK)
    assert blocks.index(old, 0, key, spans(1, 1, 1, 1))
    blocks.release(old)
    young: list[int] = []
    blocks.reserve(young, 0, BLOCK)
    assert not blocks.index(young, 0, key, spans(2, 2, 2, 2), oldest_version=1)
    assert blocks.index(young, 0, key, spans(2, 2, 2, 2), oldest_version=2)
    assert found(blocks, (1,)) == young == [2]
    assert (blocks.num_indexed_blocks, blocks.num_free_blocks) == (1, 1)
    assert blocks.reserve(young, BLOCK, 2 * BLOCK) == []
    assert young == [2, 1]


def test_a_new_generation_finds_nothing_of_the_old_one_and_gets_all_its_space() -> None:
    blocks = manager(4)
    live = compute(blocks, (1, 2))
    blocks.release(compute(blocks, (3,)))
    blocks.start_index_generation()
    assert found(blocks, (1, 2)) == found(blocks, (3,)) == []
    assert (blocks.num_indexed_blocks, blocks.num_free_blocks) == (0, 2)
    blocks.release(live)
    assert blocks.num_free_blocks == 4
    assert compute(blocks, (5, 6, 7, 8)) == found(blocks, (5, 6, 7, 8))


def test_a_block_with_a_live_child_is_never_given_up() -> None:
    blocks = manager(3)
    blocks.release(compute(blocks, (1,)))
    table = compute(blocks, (1, 2))
    other: list[int] = []
    assert blocks.reserve(other, 0, 2 * BLOCK) is None
    assert blocks.reserve(other, 0, BLOCK) == []
    assert found(blocks, (1, 2)) == table


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
def test_any_history_keeps_what_it_must_and_gives_up_in_order(
    lru: bool, history: list[tuple[Text, bool, int]]
) -> None:
    blocks, model = manager(7, lru=lru), Model()
    tables: list[tuple[Text, list[int]]] = []
    for text, releases, choice in history:
        if releases and tables:
            old, table = tables.pop(choice % len(tables))
            blocks.release(table)
            model.release(old, keeps=lru)
        else:
            _enter(blocks, model, tables, text)
        assert _all_known(blocks) == model.known()
        used = len({t[:i] for t in model.live for i in range(1, len(t) + 1)})
        assert blocks.num_used_blocks == used == len(blocks.used_blocks())
        assert blocks.num_free_blocks + used == 7
        assert blocks.num_indexed_blocks == len(model.known())


def _enter(
    blocks: BlockManager, model: Model, tables: list[tuple[Text, list[int]]], text: Text
) -> None:
    """Match, pin, then take what is missing; given up are only unused blocks, in their order."""
    known = model.known()
    num_missing = sum(text[:i] not in known for i in range(1, len(text) + 1))
    matched = blocks.pin(blocks.find_prefix(keys_of(text)))
    assert len(matched) == len(text) - num_missing
    copies = blocks.reserve(matched, len(matched) * BLOCK, len(text) * BLOCK)
    prefix = text[: len(text) - num_missing]
    model.use(prefix)
    in_use = {t[:i] for t in model.live for i in range(1, len(t) + 1)}
    num_kept = len(in_use) + len(model.unused)
    if copies is None:
        assert len(in_use) + num_missing > 7
        blocks.release(matched)
        model.release(prefix, keeps=blocks._keeps_unused)
        return
    assert copies == []
    for _ in range(num_kept + num_missing - 7):
        model.give_up()
    for position, key in enumerate(keys_of(text)):
        assert blocks.index(matched, position, key, spans())
    model.live.remove(prefix)
    model.use(text)
    tables.append((text, matched))


def _all_known(blocks: BlockManager) -> set[Text]:
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
