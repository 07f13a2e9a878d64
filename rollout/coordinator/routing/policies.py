"""Routing policies, which choose the engine (data-parallel rank) of a request.

Called by `rollout.coordinator.core.dispatcher`. Made by `rollout.coordinator.coordinator`, found by
name in `rollout.apis.fleet_processes`. Users add their own with `register_policy`. A policy keeps
its own counts in memory, and uses no socket, clock or thread.
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
    """Chooses ranks. Its other methods report events; a subclass need not override them.

    Ranks are small integers. `hashes`: compute_block_hashes_batched of the prompt, [] for a prompt
    shorter than a block. The same calls must give the same choices. The coordinator waits for each
    call: no method may block, or take longer the more requests the policy has seen.
    """

    def rank_joined(self, rank: int) -> None:
        """Add a rank that accepts requests from now on. It has no cached block and no request."""

    def rank_left(self, rank: int) -> None:
        """Remove a rank that accepts no more requests. Its blocks are gone. Its unfinished requests
        are assigned again, and never reported as finished on this rank."""

    def cache_dropped(self, rank: int) -> None:
        """Drop the rank's cached blocks: it serves other weights now, or has released its KV
        memory."""

    def choose(self, hashes: Sequence[int], ranks: AbstractSet[int], num_tokens: int) -> int:
        """Return the rank, one of `ranks`, for samples of a prompt with these blocks. `ranks`: the
        ranks with room. `num_tokens`: as in `assigned`, summed over the samples."""

    def assigned(self, rank: int, hashes: Sequence[int], num_tokens: int) -> None:
        """Record that the rank got a request with these blocks. `num_tokens`: the most prompt and
        new tokens that it can have. Called once per request, even within a group."""

    def finished(self, rank: int, num_tokens: int) -> None:
        """Record that a request, which the rank got with `num_tokens`, completed, failed or was
        aborted."""


class RoundRobinPolicy(RoutingPolicy):
    """Chooses ranks in turn, by number. Prefix policies do so for prompts without a match."""

    def __init__(self) -> None:
        self._previous = -1

    def choose(self, hashes: Sequence[int], ranks: AbstractSet[int], num_tokens: int) -> int:
        """Return the next rank above the previous one; after the highest, the lowest."""
        self._previous = min([r for r in ranks if r > self._previous] or ranks)
        return self._previous


class LongestPrefixPolicy(RoundRobinPolicy):
    """Chooses the rank that was assigned the longest prefix of the prompt; of several ranks, the
    latest one. Chooses ranks in turn if there is no such rank or it has no room.

    Remembers at most `max_rows` pairs of block and rank. Load does not matter: requests that share
    only their first block still go to one rank.
    """

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
    """Chooses the rank that was last assigned the prompt's first block. Keeps first blocks only."""

    def choose(self, hashes: Sequence[int], ranks: AbstractSet[int], num_tokens: int) -> int:
        return super().choose(hashes[:1], ranks, num_tokens)

    def assigned(self, rank: int, hashes: Sequence[int], num_tokens: int) -> None:
        super().assigned(rank, hashes[:1], num_tokens)


class LoadBalancedPolicy(LongestPrefixPolicy):
    """Chooses the rank that was assigned the longest prefix of the prompt, unless its load exceeds
    the bound. Else chooses the rank with the least load; of several, the one assigned last.

    The load is the number of outstanding tokens or requests. The prefix's rank may have a load of
    at most `max_imbalance` times the least load plus the load to assign. Prompts that share only a
    template spread over the ranks, and prompts that share more go where their blocks are.
    """

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
    ConfigError if another policy has the name, or if the name is empty or has a colon, which marks
    a path."""
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

    A name is known only in processes that imported its module. For another process, find the
    factory here and send it: a class pickles as its module and name. Raises ConfigError for an
    unknown name.
    """
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
    """Return a new policy of this name, path or factory. `options`: the factory's keyword
    arguments. Raises ConfigError if the policy is unknown, takes other options, or lacks a
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
