"""find_policy finds policies by name, path or class; its refusals name the nearest policy."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from typing import Any

import pytest

from rollout import PrefixCachingCoordinatorPolicy
from rollout.coordinator.routing.policies import (
    LoadBalancedPolicy,
    RoundRobinPolicy,
    RoutingPolicy,
    find_policy,
    make_policy,
    register_policy,
)
from rollout.errors import ConfigError

NAMES = [policy.value for policy in PrefixCachingCoordinatorPolicy]


def ready(policy: RoutingPolicy) -> RoutingPolicy:
    for rank in range(3):
        policy.rank_joined(rank)
    return policy


class LastRankPolicy(RoundRobinPolicy):
    """A user's: always the highest rank, shifted down by `offset`."""

    def __init__(self, offset: int = 0) -> None:
        super().__init__()
        self.offset = offset

    def choose(self, hashes: Sequence[int], ranks: AbstractSet[int], num_tokens: int) -> int:
        return sorted(ranks)[-1 - self.offset]


def test_a_registered_policy_is_made_by_its_name_with_its_options() -> None:
    assert register_policy("test_last_rank")(LastRankPolicy) is LastRankPolicy
    assert ready(make_policy("test_last_rank", offset=1)).choose([], {0, 1, 2}, 1) == 1
    register_policy("test_last_rank")(LastRankPolicy)  # a module imported again
    with pytest.raises(ConfigError, match=r"'test_last_rank' is .*LastRankPolicy already"):
        register_policy("test_last_rank")(RoundRobinPolicy)
    assert find_policy("test_last_rank") is LastRankPolicy


def test_a_path_a_member_or_a_class_makes_a_policy_too() -> None:
    path = "rollout.coordinator.routing.policies:LoadBalancedPolicy"
    assert isinstance(make_policy(path, load_unit="requests"), LoadBalancedPolicy)
    assert ready(make_policy(LastRankPolicy)).choose([], {0, 1, 2}, 1) == 2
    for member in PrefixCachingCoordinatorPolicy:
        assert type(make_policy(member)) is type(make_policy(member.value))


def test_find_policy_returns_a_factory_that_pickles() -> None:
    for name in NAMES:
        assert pickle.loads(pickle.dumps(find_policy(name))) is find_policy(name)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("longest_prefx", "did you mean 'longest_prefix'"),
        ("LOAD_BALANCED", "did you mean 'load_balanced'"),
        ("", "Known: first_prefix_block, load_balanced, longest_prefix, round_robin"),
        ("no_such_package.routing:Policy", "cannot be imported: No module named"),
        ("rollout.coordinator.routing.policies:Missing", "cannot be imported: .*Missing"),
        ("rollout.coordinator.routing.policies:", "cannot be imported"),
        (":LoadBalancedPolicy", "cannot be imported"),
        ("rollout.errors:__doc__", "is not a class or function"),
        ("builtins:object", "builtins:object has no rank_joined, rank_left"),
    ],
)
def test_a_policy_that_cannot_be_made_is_refused_with_the_reason(wrong: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_policy(wrong)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("round_robin", {"max_rows": 5}, "RoundRobinPolicy takes"),
        ("longest_prefix", {"max_rows": 0}, "max_rows=0 must be"),
        ("load_balanced", {"load_unit": "bytes"}, "load_unit='bytes' must be 'tokens'"),
    ],
)
def test_options_that_do_not_fit_are_refused(
    name: str, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        make_policy(name, **options)


@pytest.mark.parametrize("name", ["", "a:b"])
def test_a_name_that_could_be_a_path_or_nothing_is_not_registered(name: str) -> None:
    with pytest.raises(ConfigError, match="must not be empty or have a colon"):
        register_policy(name)
