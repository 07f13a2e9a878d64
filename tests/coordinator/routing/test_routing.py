"""Each routing policy chooses the rank that a naive implementation chooses."""

from __future__ import annotations

import pickle
import random
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout import PrefixCachingCoordinatorPolicy, compute_block_hashes_batched
from rollout.coordinator.routing.policies import (
    FirstPrefixBlockPolicy,
    LoadBalancedPolicy,
    LongestPrefixPolicy,
    RoundRobinPolicy,
    RoutingPolicy,
    make_policy,
)

BLOCK = 4
NUM_RANKS = 4
NAMES = [policy.value for policy in PrefixCachingCoordinatorPolicy]


def hashes_of(text: Sequence[int]) -> list[int]:
    """A letter of `text` stands for a block of equal tokens."""
    return compute_block_hashes_batched([letter for letter in text for _ in range(BLOCK)], BLOCK)


@dataclass
class NaivePolicy:
    """All four policies by full scans over everything that ever happened."""

    name: str
    ranks: list[int] = field(default_factory=list)
    owned: dict[int, dict[int, int]] = field(default_factory=dict)  # rank -> hash -> assignment
    outstanding: dict[int, list[int]] = field(default_factory=dict)
    last_assigned: dict[int, int] = field(default_factory=dict)
    previous: int = -1
    num_assignments: int = 0

    def rank_joined(self, rank: int) -> None:
        self.ranks.append(rank)
        self.owned[rank], self.outstanding[rank], self.last_assigned[rank] = {}, [], 0

    def rank_left(self, rank: int) -> None:
        self.ranks.remove(rank)

    def cache_dropped(self, rank: int) -> None:
        self.owned[rank] = {}

    def assigned(self, rank: int, hashes: Sequence[int], num_tokens: int) -> None:
        self.num_assignments += 1
        self.last_assigned[rank] = self.num_assignments
        self.owned[rank].update({block_hash: self.num_assignments for block_hash in hashes})
        self.outstanding[rank].append(num_tokens)

    def finished(self, rank: int, num_tokens: int) -> None:
        self.outstanding[rank].remove(num_tokens)

    def choose(self, hashes: Sequence[int], ranks: AbstractSet[int], num_tokens: int) -> int:
        owner = self._owner(hashes)
        if self.name == "load_balanced":
            loads = {r: (sum(self.outstanding[r]), -self.last_assigned[r], r) for r in ranks}
            least = min(loads.values())
            bound = 1.2 * least[0] + num_tokens
            return owner if owner in loads and loads[owner][0] <= bound else least[2]
        if owner in ranks:
            return owner
        above = [rank for rank in ranks if rank > self.previous]
        self.previous = min(above or ranks)
        return self.previous

    def _owner(self, hashes: Sequence[int]) -> int:
        wanted = {"round_robin": 0, "first_prefix_block": 1}.get(self.name, len(hashes))
        for block_hash in reversed(hashes[:wanted]):
            owners = [rank for rank in self.ranks if block_hash in self.owned[rank]]
            if owners:
                return max(owners, key=lambda rank: self.owned[rank][block_hash])
        return -1


prompts = st.lists(st.integers(1, 3), max_size=4).map(hashes_of)
ranks = st.integers(0, NUM_RANKS - 1)
events = st.lists(
    st.one_of(
        st.tuples(st.just("request"), prompts, st.integers(1, 3), st.sets(ranks)),
        st.tuples(st.just("request"), prompts, st.integers(1, 3), st.just(set())),
        st.tuples(st.just("send"), ranks, prompts),
        st.tuples(st.just("finish"), st.integers(0, 9)),
        st.tuples(st.just("join or leave"), ranks),
        st.tuples(st.just("cache_dropped"), ranks),
    ),
    max_size=60,
)


@dataclass
class Driver:
    """Turns random events into the calls that a coordinator could make, for several policies."""

    policies: Sequence[RoutingPolicy]
    joined: dict[int, None] = field(default_factory=dict)
    running: list[tuple[int, int]] = field(default_factory=list)  # rank, tokens

    def send_to(self, method: str, *arguments: Any) -> list[Any]:
        return [getattr(policy, method)(*arguments) for policy in self.policies]

    def play(self, event: str, *arguments: Any) -> list[int]:
        """The ranks that they chose, if there was something to choose."""
        if event == "join or leave":
            self._join_or_leave(*arguments)
        elif event == "finish":
            if self.running:
                self.send_to("finished", *self.running.pop(arguments[0] % len(self.running)))
        elif event == "request":
            return self._request(*arguments) if self.joined else []
        elif arguments[0] in self.joined:
            if event == "send":
                self._assign(*arguments, 1)
            else:
                self.send_to(event, *arguments)
        return []

    def _join_or_leave(self, rank: int) -> None:
        if rank in self.joined:
            del self.joined[rank]
            self.running = [request for request in self.running if request[0] != rank]
            self.send_to("rank_left", rank)
        else:
            self.joined[rank] = None
            self.send_to("rank_joined", rank)

    def _request(self, hashes: Sequence[int], num_tokens: int, full: set[int]) -> list[int]:
        """`full`: ranks without room, unless all are."""
        with_room = set(self.joined) - full or set(self.joined)
        chosen = self.send_to("choose", hashes, with_room, num_tokens)
        assert chosen[0] in with_room
        self._assign(chosen[0], hashes, num_tokens)
        return chosen

    def _assign(self, rank: int, hashes: Sequence[int], num_tokens: int) -> None:
        self.send_to("assigned", rank, hashes, num_tokens)
        self.running.append((rank, num_tokens))


@pytest.mark.parametrize("name", NAMES)
@given(happened=events)
def test_a_policy_chooses_what_full_scans_choose(
    name: str, happened: list[tuple[Any, ...]]
) -> None:
    driver = Driver([make_policy(name), NaivePolicy(name)])
    driver.play("join or leave", 2)
    for event in happened:
        assert len(set(driver.play(*event))) <= 1


@pytest.mark.parametrize("name", NAMES)
@given(happened=events)
def test_the_same_calls_give_the_same_choices_also_with_few_rows(
    name: str, happened: list[tuple[Any, ...]]
) -> None:
    options = {} if name == "round_robin" else {"max_rows": 5}
    driver = Driver([make_policy(name, **options), make_policy(name, **options)])
    for event in happened:
        assert len(set(driver.play(*event))) <= 1


def choice(
    policy: RoutingPolicy, hashes: Sequence[int] = (), num_tokens: int = 1, num_ranks: int = 3
) -> int:
    """Among the first ranks."""
    return policy.choose(hashes, set(range(num_ranks)), num_tokens)


def ready(policy: RoutingPolicy, num_ranks: int = 3) -> RoutingPolicy:
    for rank in range(num_ranks):
        policy.rank_joined(rank)
    return policy


def test_round_robin_rotates_while_ranks_join_and_leave() -> None:
    policy = ready(RoundRobinPolicy())
    assert [choice(policy) for _ in range(4)] == [0, 1, 2, 0]
    policy.rank_left(1)
    policy.rank_joined(3)
    assert [policy.choose([], {0, 2, 3}, 1) for _ in range(4)] == [2, 3, 0, 2]


def test_longest_prefix_goes_to_the_deepest_block_and_first_block_to_the_latest() -> None:
    longest, first = ready(LongestPrefixPolicy()), ready(FirstPrefixBlockPolicy())
    for policy in (longest, first):
        policy.assigned(1, hashes_of([1, 2, 3]), 10)
        policy.assigned(2, hashes_of([1, 2, 4]), 10)
    assert choice(longest, hashes_of([1, 2, 3, 9])) == 1
    assert choice(longest, hashes_of([1, 2, 9])) == 2
    assert choice(first, hashes_of([1, 2, 3, 9])) == 2


def test_without_a_match_prefix_policies_use_round_robin() -> None:
    for policy in (ready(LongestPrefixPolicy()), ready(FirstPrefixBlockPolicy())):
        policy.assigned(1, hashes_of([1, 2]), 10)
        prompts = [hashes_of([5]), [], hashes_of([1, 2]), hashes_of([2, 1]), hashes_of([6])]
        assert [choice(policy, prompt) for prompt in prompts] == [0, 1, 1, 2, 0]


def test_load_balanced_counts_tokens_or_requests() -> None:
    by_tokens, by_requests = ready(LoadBalancedPolicy()), ready(LoadBalancedPolicy("requests"))
    for policy in (by_tokens, by_requests):
        policy.assigned(0, [], 5)
        policy.assigned(0, [], 5)
        policy.assigned(1, [], 100)
        policy.assigned(2, [], 50)
        policy.assigned(2, [], 50)
    assert (choice(by_tokens), choice(by_requests)) == (0, 1)


def test_of_equal_loads_the_latest_assignment_wins_then_the_lowest_rank() -> None:
    policy = ready(LoadBalancedPolicy())
    assert choice(policy) == 0
    policy.assigned(2, [], 10)
    assert choice(policy) == 0
    policy.finished(2, 10)
    assert choice(policy) == 2
    policy.rank_left(2)
    policy.rank_joined(2)
    assert choice(policy) == 0


def test_the_least_loaded_is_found_after_many_requests_in_memory_that_does_not_grow() -> None:
    policy, draw, running = ready(LoadBalancedPolicy(), num_ranks=5), random.Random(0), []
    loads, sizes = [0] * 5, []
    for number in range(2000):
        if len(running) > 20:
            rank, num_tokens = running.pop(draw.randrange(len(running)))
            policy.finished(rank, num_tokens)
            loads[rank] -= num_tokens
        else:
            assert loads[choice(policy, num_ranks=5)] == min(loads)
            running.append((draw.randrange(5), draw.randrange(1000)))
            policy.assigned(running[-1][0], [], running[-1][1])
            loads[running[-1][0]] += running[-1][1]
        sizes.append(len(pickle.dumps(policy)))
        assert number < 200 or sizes[-1] < 1.2 * max(sizes[:200])


def test_the_load_of_a_rank_ends_when_it_leaves() -> None:
    policy = ready(LoadBalancedPolicy(), num_ranks=2)
    policy.assigned(0, [], 10)
    policy.assigned(1, [], 20)
    policy.rank_left(1)
    policy.rank_joined(1)
    assert choice(policy, num_ranks=2) == 1


def test_a_ranks_prefix_counts_while_its_load_is_bounded() -> None:
    policy, template = ready(LoadBalancedPolicy(max_imbalance=1.5), num_ranks=2), hashes_of([1, 2])
    policy.assigned(0, template, 100)
    assert choice(policy, template, 100, num_ranks=2) == 0
    assert choice(policy, template, 99, num_ranks=2) == 1, "100 is above 1.5 * 0 + 99"
    policy.assigned(1, [], 60)
    assert choice(policy, template, 10, num_ranks=2) == 0
    assert policy.choose(template, {1}, 100) == 1, "a rank without room was chosen"


def test_prefix_policies_pass_over_an_owner_without_room() -> None:
    for policy in (ready(LongestPrefixPolicy()), ready(FirstPrefixBlockPolicy())):
        policy.assigned(1, hashes_of([1]), 10)
        assert policy.choose(hashes_of([1]), {0, 2}, 1) == 0
        assert policy.choose(hashes_of([1]), {0, 2}, 1) == 2
        assert policy.choose(hashes_of([1]), {0, 1}, 1) == 1
