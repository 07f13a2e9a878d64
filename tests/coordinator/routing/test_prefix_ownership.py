"""PrefixOwnership equals a table of full scans, in bounded memory that is released."""

from __future__ import annotations

import copy
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from rollout.coordinator.routing.prefix_ownership import PrefixOwnership

NUM_RANKS = 4
NO_BOUND = 10**9


def chain(text: Sequence[int]) -> list[int]:
    """One hash per letter of `text`, which stands for a block; each covers those before it."""
    return [1 + hash(tuple(text[: end + 1])) % (2**61 - 1) for end in range(len(text))]


@dataclass
class FullScans:
    """The same table without any index: (hash, rank) -> number of its last assignment."""

    rows: dict[tuple[int, int], int] = field(default_factory=dict)
    num_assignments: int = 0

    def assign(self, rank: int, hashes: Sequence[int]) -> None:
        self.num_assignments += 1
        self.rows.update({(block_hash, rank): self.num_assignments for block_hash in hashes})

    def drop_rank(self, rank: int) -> None:
        self.rows = {row: number for row, number in self.rows.items() if row[1] != rank}

    def longest_match_owner(self, hashes: Sequence[int]) -> int | None:
        for depth in reversed(range(len(hashes))):
            owners = {r: n for (h, r), n in self.rows.items() if h == hashes[depth]}
            if owners:
                return max(owners, key=owners.__getitem__)
        return None


prompts = st.lists(st.integers(0, 2), max_size=5).map(chain)
ranks = st.integers(0, NUM_RANKS - 1)
actions = st.lists(
    st.one_of(
        st.tuples(st.just("assign"), ranks, prompts),
        st.tuples(st.just("assign"), ranks, prompts),
        st.tuples(st.just("drop_rank"), ranks),
        st.tuples(st.just("leave and join"), ranks),
        st.tuples(st.just("look"), prompts),
    ),
    max_size=60,
)


def table(max_rows: int = NO_BOUND, num_ranks: int = NUM_RANKS) -> PrefixOwnership:
    ownership = PrefixOwnership(max_rows)
    for rank in range(num_ranks):
        ownership.add_rank(rank)
    return ownership


def act(ownership: PrefixOwnership, oracle: FullScans, action: str, *arguments: object) -> None:
    """Do the same to both; a look must find the same."""
    if action == "look":
        (hashes,) = arguments
        assert ownership.longest_match_owner(hashes) == oracle.longest_match_owner(hashes)
    elif action == "leave and join":
        (rank,) = arguments
        ownership.remove_rank(rank)
        ownership.add_rank(rank)
        oracle.drop_rank(rank)
    else:
        getattr(ownership, action)(*arguments)
        getattr(oracle, action)(*arguments)


def owners_in_order(table: PrefixOwnership | FullScans, block_hash: int) -> list[int]:
    """Return the owners of a block, the latest first. Each drops its blocks in a copy."""
    table, owners = copy.deepcopy(table), list[int]()
    while (owner := table.longest_match_owner([block_hash])) is not None:
        owners.append(owner)
        table.drop_rank(owner)
    return owners


def assert_all_is_given_back(ownership: PrefixOwnership, hashes: Sequence[int]) -> None:
    """Rows of ranks that own nothing go as they are met."""
    for rank in range(NUM_RANKS):
        ownership.drop_rank(rank)
    assert not any(ownership.longest_match_owner([h]) is not None for h in hashes)
    assert len(ownership) == 0


def all_hashes(done: Sequence[tuple[object, ...]]) -> list[int]:
    return sorted({h for event in done for part in event if isinstance(part, list) for h in part})


@given(actions)
def test_the_owners_are_those_that_full_scans_find(done: list[tuple[object, ...]]) -> None:
    ownership, oracle = table(), FullScans()
    has_dead_rows = False
    for action in done:
        act(ownership, oracle, *action)
        has_dead_rows |= action[0] in ("drop_rank", "leave and join")
        assert len(ownership) >= len(oracle.rows)
        assert has_dead_rows or len(ownership) == len(oracle.rows)
    for block_hash in all_hashes(done):
        assert owners_in_order(ownership, block_hash) == owners_in_order(oracle, block_hash)
    assert_all_is_given_back(ownership, all_hashes(done))


@given(actions, st.integers(1, 12))
def test_the_bound_holds_and_a_row_that_is_kept_is_right(
    done: list[tuple[object, ...]], max_rows: int
) -> None:
    ownership, oracle = table(max_rows), FullScans()
    for action in done:
        if action[0] != "look":
            act(ownership, oracle, *action)
        assert 0 <= len(ownership) <= max_rows
    for block_hash in all_hashes(done):
        kept = owners_in_order(ownership, block_hash)
        true = owners_in_order(oracle, block_hash)
        assert kept == [rank for rank in true if rank in kept]
    assert_all_is_given_back(ownership, all_hashes(done))


@given(
    st.lists(st.tuples(ranks, prompts.filter(bool)), min_size=1, max_size=40), st.integers(1, 12)
)
def test_the_least_recent_blocks_are_evicted_first_and_children_before_parents(
    assigned: list[tuple[int, list[int]]], max_rows: int
) -> None:
    ownership = table(max_rows)
    kept: dict[int, list[int]] = {}  # hash -> ranks, latest first; oldest use first
    for rank, hashes in assigned:
        ownership.assign(rank, hashes)
        for block_hash in reversed(hashes):
            others = [r for r in kept.pop(block_hash, []) if r != rank]
            kept[block_hash] = [rank, *others]
        while sum(map(len, kept.values())) > max_rows:
            del kept[next(iter(kept))]
    for _, hashes in assigned:
        is_known = [ownership.latest_owner(block_hash) is not None for block_hash in hashes]
        assert is_known == sorted(is_known, reverse=True)
    for block_hash in {h for _, hashes in assigned for h in hashes}:
        assert owners_in_order(ownership, block_hash) == kept.get(block_hash, [])


@given(actions)
def test_the_same_calls_leave_the_same_rows(done: list[tuple[object, ...]]) -> None:
    tables = [table(max_rows=9), table(max_rows=9)]
    looks: list[list[object]] = [[], []]
    for ownership, seen in zip(tables, looks, strict=True):
        for action, *arguments in done:
            if action == "look":
                seen.append(ownership.longest_match_owner(*arguments))
            else:
                act(ownership, FullScans(), action, *arguments)
            seen.append(len(ownership))
    assert looks[0] == looks[1]


def test_the_latest_of_several_owners_wins_and_the_one_before_follows_it() -> None:
    ownership, block = table(), chain([1])
    for rank in (0, 1, 2, 0):
        ownership.assign(rank, block)
    assert ownership.longest_match_owner(block) == 0
    ownership.drop_rank(0)
    assert ownership.longest_match_owner(block) == 2
    ownership.drop_rank(2)
    assert ownership.longest_match_owner(block) == 1
    ownership.remove_rank(1)
    assert ownership.longest_match_owner(block) is None
    assert len(ownership) == 0


def test_a_rank_that_joins_again_owns_no_block() -> None:
    ownership, blocks = table(), chain([1, 2])
    ownership.assign(0, blocks)
    ownership.remove_rank(0)
    ownership.add_rank(0)
    assert ownership.longest_match_owner(blocks) is None
    ownership.assign(0, blocks[:1])
    assert [ownership.latest_owner(block_hash) for block_hash in blocks] == [0, None]


def test_a_dead_owner_is_not_kept_behind_the_next_one() -> None:
    ownership, block = table(), chain([1])
    ownership.assign(0, block)
    ownership.drop_rank(0)
    ownership.assign(1, block)
    assert len(ownership) == 1


def test_rows_of_dead_weights_are_given_back_while_others_are_assigned() -> None:
    num_prompts, num_blocks = 500, 10
    ownership = table()
    for number in range(num_prompts):
        ownership.assign(number % NUM_RANKS, chain([number, *range(num_blocks - 1)]))
    assert len(ownership) == num_prompts * num_blocks
    for rank in range(NUM_RANKS):
        ownership.drop_rank(rank)
    # Two are swept for each that comes, so half as many calls as there were suffice.
    for number in range(num_prompts // 2):
        ownership.assign(0, chain([num_prompts + number, *range(num_blocks - 1)]))
    assert len(ownership) == num_prompts // 2 * num_blocks


def test_a_block_that_is_always_in_use_does_not_gather_the_rows_of_old_weights() -> None:
    ownership, hot = table(), chain([7])
    for _ in range(1000):
        for rank in range(NUM_RANKS):
            ownership.drop_rank(rank)
            ownership.assign(rank, hot)
        assert len(ownership) <= 1 + 2 * NUM_RANKS
    assert ownership.latest_owner(hot[0]) == NUM_RANKS - 1


def num_lines_run(work: object, *arguments: object) -> int:
    """Python lines executed by a call: a count that no busy machine changes."""
    num_lines = 0

    def trace(frame: object, event: str, argument: object) -> object:
        nonlocal num_lines
        num_lines += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work(*arguments)
    finally:
        sys.settrace(before)
    return num_lines


def decide(ownership: PrefixOwnership, hashes: Sequence[int], rank: int) -> None:
    ownership.longest_match_owner(hashes)
    ownership.assign(rank, hashes)


def test_a_routing_decision_costs_the_same_for_many_rows_and_ranks_as_for_few() -> None:
    counts = []
    for num_prompts, num_ranks in ((10, 2), (3000, 2), (3000, 64)):
        ownership = table(max_rows=32 * num_prompts, num_ranks=num_ranks)
        for rank in range(num_ranks):
            ownership.assign(rank, chain(range(32)))  # shared by all ranks
        for number in range(num_prompts):
            ownership.assign(number % num_ranks, chain([100 + number, *range(31)]))
        first, last = (chain([100 + n, *range(31)]) for n in (0, num_prompts - 1))
        unknown = chain([99, *range(31)])
        counts.append(
            [
                num_lines_run(decide, ownership, prompt, 0)
                for prompt in (first, last, chain(range(32)), unknown)
            ]
        )
    assert max(counts[1]) <= 1.2 * max(counts[0])
    assert max(counts[2]) <= 1.2 * max(counts[1])
