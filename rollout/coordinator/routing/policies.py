"""Routing policies, which choose the engine (data-parallel rank) of each request.

Used by `rollout.coordinator.core.dispatcher`, which calls a policy, by
`rollout.coordinator.coordinator`, which makes it, and by `rollout.apis.fleet_processes`
(`find_policy`). Users add policies with `register_policy`. A policy keeps its counts in memory.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from enum import Enum
from typing import Any, Protocol, TypeVar, runtime_checkable

from rollout.config import PrefixCachingCoordinatorPolicy
from rollout.coordinator.routing.prefix_ownership import DEFAULT_MAX_ROWS, PrefixOwnership
from rollout.errors import ConfigError


@runtime_checkable
class RoutingPolicy(Protocol):
    """Protocol of a routing policy. Subclasses override `choose`, and the events that they need.

    Ranks are small integers. `hashes` is compute_block_hashes_batched of the prompt, or [] for a
    prompt shorter than one block. The same calls must give the same choices. The coordinator waits
    for each call, so no method may block, or become slower with the number of requests it has
    seen."""

    def rank_joined(self, rank: int) -> None:
        """Add a rank that accepts requests from now on. It has no cached block and no request."""

    def rank_left(self, rank: int) -> None:
        """Remove a rank and its cached blocks. The rank's unfinished requests are assigned again,
        and never reported as finished on this rank."""

    def cache_dropped(self, rank: int) -> None:
        """Drop the rank's cached blocks. The rank serves other weights now, or has released its KV
        memory."""

    def choose(self, hashes: Sequence[int], ranks: AbstractSet[int], num_tokens: int) -> int:
        """Return the rank, one of `ranks`, for the samples of a prompt with these block hashes.
        `ranks` holds the ranks with room. `num_tokens` is the sum of the samples' `num_tokens` in
        `assigned`."""

    def assigned(self, rank: int, hashes: Sequence[int], num_tokens: int) -> None:
        """Record that the rank got one request with these block hashes. `num_tokens` is the most
        prompt and new tokens that the request can have. The coordinator calls this method once per
        sample of a group."""

    def finished(self, rank: int, num_tokens: int) -> None:
        """Record that a request of the rank completed, failed or was aborted. `num_tokens` is the
        same as in `assigned`."""


class RoundRobinPolicy(RoutingPolicy):
    """Chooses ranks in turn, by number."""

    def __init__(self) -> None:
        self._previous = -1

    def choose(self, hashes: Sequence[int], ranks: AbstractSet[int], num_tokens: int) -> int:
        """Return the next higher rank than the previous choice, or the lowest rank after the
        highest."""
        self._previous = min([r for r in ranks if r > self._previous] or ranks)
        return self._previous


class LongestPrefixPolicy(RoundRobinPolicy):
    """Chooses the rank that was assigned the longest prefix of the prompt.

    The latest such rank is chosen if there are several. Ranks are chosen in turn if no rank has a
    prefix, or if the rank with the prefix has no room. The policy remembers at most `max_rows`
    pairs of block and rank. Load does not matter, so requests that share only their first block go
    to one rank."""

    def __init__(self, max_rows: int = DEFAULT_MAX_ROWS) -> None:
        super().__init__()
        if max_rows < 1:
            raise ConfigError(f"max_rows={max_rows} must be an integer of at least 1")
        self._ownership = PrefixOwnership(max_rows)

    def rank_joined(self, rank: int) -> None:
        self._ownership.add_rank(rank)

    def rank_left(self, rank: int) -> None:
        self._ownership.remove_rank(rank)

    def cache_dropped(self, rank: int) -> None:
        self._ownership.drop_rank(rank)

    def choose(self, hashes: Sequence[int], ranks: AbstractSet[int], num_tokens: int) -> int:
        owner = self._ownership.longest_match_owner(hashes)
        if owner is not None and owner in ranks:
            return owner
        return super().choose(hashes, ranks, num_tokens)

    def assigned(self, rank: int, hashes: Sequence[int], num_tokens: int) -> None:
        if hashes:
            self._ownership.assign(rank, hashes)


class FirstPrefixBlockPolicy(LongestPrefixPolicy):
    """Chooses the rank that was last assigned the prompt's first block."""

    def choose(self, hashes: Sequence[int], ranks: AbstractSet[int], num_tokens: int) -> int:
        return super().choose(hashes[:1], ranks, num_tokens)

    def assigned(self, rank: int, hashes: Sequence[int], num_tokens: int) -> None:
        super().assigned(rank, hashes[:1], num_tokens)


class LoadBalancedPolicy(LongestPrefixPolicy):
    """Chooses the rank with the longest prefix of the prompt, unless the rank's load exceeds a
    bound.

    Above the bound, or without such a rank, it chooses the rank with the least load. The rank
    assigned last is chosen if several have the least load. The load is the number of outstanding
    tokens or requests, by `load_unit`. The bound is `max_imbalance` times the least load, plus the
    load of the new samples. Prompts that share only a template spread over the ranks. Prompts that
    share more go to the rank that was assigned their blocks."""

    def __init__(
        self,
        load_unit: str = "tokens",
        max_imbalance: float = 1.2,
        max_rows: int = DEFAULT_MAX_ROWS,
    ) -> None:
        super().__init__(max_rows)
        if load_unit not in ("tokens", "requests"):
            raise ConfigError(f"load_unit={load_unit!r} must be 'tokens' or 'requests'")
        if not max_imbalance >= 1:
            raise ConfigError(f"max_imbalance={max_imbalance} must be at least 1")
        self._counts_tokens, self._max_imbalance = load_unit == "tokens", max_imbalance
        self._num_assignments = 0
        # (outstanding, -number of the last assignment, rank): the smallest is chosen
        self._load_of_rank: dict[int, tuple[int, int, int]] = {}

    def rank_joined(self, rank: int) -> None:
        super().rank_joined(rank)
        self._load_of_rank[rank] = (0, 0, rank)

    def rank_left(self, rank: int) -> None:
        super().rank_left(rank)
        del self._load_of_rank[rank]

    def choose(self, hashes: Sequence[int], ranks: AbstractSet[int], num_tokens: int) -> int:
        least, _, least_rank = min(map(self._load_of_rank.__getitem__, ranks))
        owner = self._ownership.longest_match_owner(hashes) if hashes else None
        if owner is not None and owner in ranks:
            bound = self._max_imbalance * least + self._load(num_tokens)
            if self._load_of_rank[owner][0] <= bound:
                return owner
        return least_rank

    def assigned(self, rank: int, hashes: Sequence[int], num_tokens: int) -> None:
        super().assigned(rank, hashes, num_tokens)
        self._num_assignments += 1
        outstanding = self._load_of_rank[rank][0] + self._load(num_tokens)
        self._load_of_rank[rank] = (outstanding, -self._num_assignments, rank)

    def finished(self, rank: int, num_tokens: int) -> None:
        load, negative_last, _ = self._load_of_rank[rank]
        left = load - self._load(num_tokens)
        assert left >= 0, f"rank {rank} finished more than it was given"
        self._load_of_rank[rank] = (left, negative_last, rank)

    def _load(self, num_tokens: int) -> int:
        return num_tokens if self._counts_tokens else 1


PolicyFactory = Callable[..., RoutingPolicy]
_F = TypeVar("_F", bound=PolicyFactory)

# Written by register_policy alone, while modules are imported.
_FACTORIES: dict[str, PolicyFactory] = {
    PrefixCachingCoordinatorPolicy.ROUND_ROBIN.value: RoundRobinPolicy,
    PrefixCachingCoordinatorPolicy.FIRST_PREFIX_BLOCK.value: FirstPrefixBlockPolicy,
    PrefixCachingCoordinatorPolicy.LONGEST_PREFIX.value: LongestPrefixPolicy,
    PrefixCachingCoordinatorPolicy.LOAD_BALANCED.value: LoadBalancedPolicy,
}


def register_policy(name: str) -> Callable[[_F], _F]:
    """Return a decorator that registers a class or factory of a RoutingPolicy under `name`. Raises
    ConfigError if another policy has the name, if the name is empty, or if it contains ":", which
    marks a path."""
    if not name or ":" in name:
        raise ConfigError(f"the policy name {name!r} must not be empty or have a colon")

    def register(factory: _F) -> _F:
        known = _FACTORIES.setdefault(name, factory)
        if _path(known) != _path(factory):
            raise ConfigError(f"policy {name!r} is {_path(known)} already; choose another name")
        _FACTORIES[name] = factory
        return factory

    return register


def find_policy(name: str | PrefixCachingCoordinatorPolicy) -> PolicyFactory:
    """Return the factory of the policy with this name or path "package.module:Class".

    A name is known only in processes that have imported the module that registers it. For another
    process, find the factory here and send it: a class pickles as its module and name. Raises
    ConfigError if the name is unknown or the path cannot be imported."""
    name = name.value if isinstance(name, Enum) else name
    module_name, colon, attribute = name.partition(":")
    if not colon:
        if name in _FACTORIES:
            return _FACTORIES[name]
        nearest = difflib.get_close_matches(name.lower(), _FACTORIES, n=1, cutoff=0.0)[0]
        raise ConfigError(
            f"unknown routing policy {name!r}; did you mean {nearest!r}? Known: "
            f"{', '.join(sorted(_FACTORIES))}, or a path such as 'package.module:Class'"
        )
    try:
        factory = getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError, ValueError) as fault:
        raise ConfigError(f"routing policy {name!r} cannot be imported: {fault}") from fault
    if not callable(factory):
        raise ConfigError(f"routing policy {name!r} is not a class or function but {factory!r}")
    found: PolicyFactory = factory
    return found


def make_policy(
    policy: str | PrefixCachingCoordinatorPolicy | PolicyFactory, **options: Any
) -> RoutingPolicy:
    """Return a new policy of this name, path or factory, called with the keyword arguments
    `options`. Raises ConfigError if the policy is unknown, takes other options, or lacks a
    method."""
    factory = find_policy(policy) if isinstance(policy, str) else policy
    try:
        inspect.signature(factory).bind(**options)
    except TypeError as fault:
        raise ConfigError(
            f"routing policy {_path(factory)} takes {inspect.signature(factory)}: {fault}"
        ) from fault
    made = factory(**options)
    if not isinstance(made, RoutingPolicy):
        missing = [name for name in _METHODS if not callable(getattr(made, name, None))]
        raise ConfigError(f"routing policy {_path(factory)} has no {', '.join(missing)}")
    return made


_METHODS = [name for name in vars(RoutingPolicy) if not name.startswith("_")]


def _path(factory: PolicyFactory) -> str:
    name = getattr(factory, "__qualname__", repr(factory))
    return f"{getattr(factory, '__module__', '?')}:{name}"
