"""Interleaved rounds: each round runs every engine once, so other load slows all of them.

Used by `benchmarks.generate`, `benchmarks.moe` and `benchmarks.report`.
"""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from benchmarks.contestants import Contestant, timed
from benchmarks.workloads import Workload

# Peers that take more than so many times the best peer's seconds run in the first round only.
DROP_BEHIND = 1.1
WARM_UP_TOKENS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """One run of each engine.

    cpu_seconds, tokens_per_cpu_second: by name of the engine.
    best_peer: the fastest peer that does not know output lengths.
    ratio: our speed over the speed of `best_peer`.
    best_peer_knowing_lengths: the fastest peer that sorts requests by output length, or None.
    ratio_knowing_lengths: our speed over the speed of `best_peer_knowing_lengths`, or None.
    """

    cpu_seconds: dict[str, float]
    tokens_per_cpu_second: dict[str, float]
    best_peer: str
    ratio: float
    best_peer_knowing_lengths: str | None
    ratio_knowing_lengths: float | None


@dataclass(slots=True, kw_only=True)
class Contest:
    """The rounds of one workload, and the engines that run it."""

    workload: Workload
    ours: Contestant
    peers: list[Contestant]
    rounds: list[Round] = field(default_factory=list)

    @property
    def median_ratio(self) -> float:
        """Median over rounds of our speed over the best peer's speed."""
        return statistics.median(r.ratio for r in self.rounds)

    @property
    def smallest_ratio(self) -> float:
        return min(r.ratio for r in self.rounds)


def warm_up(contest: Contest) -> None:
    """Run each engine on a few tokens, so that the first round loads and builds nothing."""
    for contestant in (contest.ours, *contest.peers):
        timed(contestant, contest.workload.shortened(WARM_UP_TOKENS), seed=0)


def play_round(contest: Contest, announce: Callable[[str], None]) -> None:
    """Run each engine once, and append the round. Every second round runs in reversed order.

    Calls `announce` with the name of each engine before its run. After the first round, slow peers
    leave the contest.
    """
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
    """Return the Round for these CPU seconds."""
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
    """Return the peers that stay. Peers that know output lengths are judged apart."""
    kept: list[Contestant] = []
    for knows in (False, True):
        group = [p for p in peers if p.knows_lengths is knows]
        limit = DROP_BEHIND * min((seconds[p.name] for p in group), default=0.0)
        kept += [p for p in group if seconds[p.name] <= limit]
    return kept
