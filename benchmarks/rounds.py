"""Interleaved rounds: every contestant once per round, so that a busy machine slows all of them."""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from benchmarks.contestants import Contestant, timed
from benchmarks.workloads import Workload

# Peers this much slower than the best peer of the first round are left out of later rounds.
DROP_BEHIND = 1.1
WARM_UP_TOKENS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """CPU seconds by contestant, and tokens per CPU second of ours over those of the best peer."""

    cpu_seconds: dict[str, float]
    tokens_per_cpu_second: dict[str, float]
    best_peer: str
    ratio: float
    best_peer_knowing_lengths: str | None
    ratio_knowing_lengths: float | None


@dataclass(slots=True, kw_only=True)
class Contest:
    """The rounds of one workload. Peers that know output lengths beforehand are compared apart."""

    workload: Workload
    ours: Contestant
    peers: list[Contestant]
    rounds: list[Round] = field(default_factory=list)

    @property
    def median_ratio(self) -> float:
        return statistics.median(r.ratio for r in self.rounds)

    @property
    def smallest_ratio(self) -> float:
        return min(r.ratio for r in self.rounds)


def warm_up(contest: Contest) -> None:
    """Run each contestant on a few tokens, so that the first round loads and builds nothing."""
    for contestant in (contest.ours, *contest.peers):
        timed(contestant, contest.workload.shortened(WARM_UP_TOKENS), seed=0)


def play_round(contest: Contest, announce: Callable[[str], None]) -> None:
    """Run each contestant once and append the round. The order is reversed each time."""
    gc.collect()
    index = len(contest.rounds)
    order = [contest.ours, *contest.peers]
    seconds = {}
    for contestant in order if index % 2 == 0 else reversed(order):
        announce(contestant.name)
        seconds[contestant.name] = timed(contestant, contest.workload, seed=index).cpu_seconds
    contest.rounds.append(_judge(contest, seconds))
    if index == 0:
        contest.peers = _not_far_behind(contest.peers, seconds)


def _judge(contest: Contest, seconds: dict[str, float]) -> Round:
    own = seconds[contest.ours.name]
    plain = [p.name for p in contest.peers if not p.knows_lengths]
    knowing = [p.name for p in contest.peers if p.knows_lengths]
    best = min(plain, key=seconds.__getitem__)
    best_knowing = min(knowing, key=seconds.__getitem__) if knowing else None
    num_tokens = contest.workload.num_tokens
    return Round(
        cpu_seconds=seconds,
        tokens_per_cpu_second={name: num_tokens / s for name, s in seconds.items()},
        best_peer=best,
        ratio=seconds[best] / own,
        best_peer_knowing_lengths=best_knowing,
        ratio_knowing_lengths=None if best_knowing is None else seconds[best_knowing] / own,
    )


def _not_far_behind(peers: Sequence[Contestant], seconds: dict[str, float]) -> list[Contestant]:
    kept: list[Contestant] = []
    for knows in (False, True):
        group = [p for p in peers if p.knows_lengths is knows]
        limit = DROP_BEHIND * min((seconds[p.name] for p in group), default=0.0)
        kept += [p for p in group if seconds[p.name] <= limit]
    return kept
