"""Interleaved rounds of contestants in processes of their own, and the ratios within a round."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field

from benchmarks.peers_process import PeerError, WorkerProcess
from benchmarks.peers_workloads import Contest, greedy_workload
from benchmarks.workloads import Workload

CLOCKS = ("cpu", "wall")


@dataclass(frozen=True, slots=True, kw_only=True)
class Contestant:
    """`is_int8` peers are shown beside the others and are never the best peer of a round."""

    name: str
    worker: WorkerProcess
    is_ours: bool = False
    is_int8: bool = False

    def generate(self, workload: Workload, seed: int, timeout_s: float) -> Answer:
        """Raises PeerError."""
        request = {"verb": "generate", "workload": asdict(workload), "seed": seed}
        reply = self.worker.ask(request, timeout_s)
        return Answer(
            tokens=reply["tokens"],
            seconds={clock: reply[f"{clock}_seconds"] for clock in CLOCKS},
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Samples, and the seconds that they took by each clock: CPU of all threads and processes of
    the contestant, and wall.
    """

    tokens: list[list[int]]
    seconds: dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """Tokens per second by clock and contestant; of ours over those of the best peer by clock."""

    tokens_per_second: dict[str, dict[str, float]]
    best_peer: dict[str, str]
    ratio: dict[str, float]


@dataclass(slots=True, kw_only=True)
class ContestRounds:
    """The rounds of one contest."""

    contest: Contest
    rounds: list[Round] = field(default_factory=list)

    def ratios(self, clock: str) -> list[float]:
        return [played.ratio[clock] for played in self.rounds]

    def speed(self, name: str, clock: str) -> float | None:
        """The median of a contestant; None if it left before the first round's end."""
        speeds = [played.tokens_per_second[clock].get(name) for played in self.rounds]
        known = [speed for speed in speeds if speed is not None]
        return statistics.median(known) if known else None


def judged(
    contestants: Sequence[Contestant], num_counted: int, seconds: Mapping[str, Mapping[str, float]]
) -> Round:
    """A round of `seconds` by contestant and clock."""
    speeds = {
        clock: {name: num_counted / taken[clock] for name, taken in seconds.items()}
        for clock in CLOCKS
    }
    ours = next(c.name for c in contestants if c.is_ours)
    peers = [c.name for c in contestants if not (c.is_ours or c.is_int8) and c.name in seconds]
    if not peers:
        raise PeerError("no peer is left to compare with")
    best = {clock: max(peers, key=speeds[clock].__getitem__) for clock in CLOCKS}
    return Round(
        tokens_per_second=speeds,
        best_peer=best,
        ratio={clock: speeds[clock][ours] / speeds[clock][best[clock]] for clock in CLOCKS},
    )


class Tournament:
    """Contestants that have loaded the model. A peer that fails leaves, and `left_out` says why.

    Raises PeerError if ours fails, or the last peer has left.
    """

    def __init__(
        self,
        contestants: Sequence[Contestant],
        left_out: dict[str, str],
        timeout_s: float,
        announce: Callable[[str], None],
    ) -> None:
        self.contestants = list(contestants)
        self.left_out = left_out
        self._timeout_s = timeout_s
        self._announce = announce

    def compare_greedy(self, contest: Contest, *, is_exact: bool) -> dict[str, float]:
        """The share of tokens equal to ours, by peer, up to the first other one of each prompt.

        Where results are exact, a peer whose tokens differ computes something else, and leaves.
        """
        tokens = {
            name: answer.tokens
            for name, answer in self._everyone("greedy", greedy_workload(contest), 0).items()
        }
        ours = tokens.pop(next(c.name for c in self.contestants if c.is_ours))
        shares = {name: equal_share(theirs, ours) for name, theirs in tokens.items()}
        for contestant in list(self.contestants):
            share = shares.get(contestant.name, 1.0)
            if is_exact and not contestant.is_int8 and share < 1:
                self._leave(contestant, f"only {share:.0%} of its greedy tokens are ours")
        return shares

    def warm_up(self, contest: Contest) -> None:
        """Everyone, so that nothing is built in the first round."""
        self._everyone(f"{contest.name}: warm-up", contest.warm_up(), 0)

    def play_round(self, played: ContestRounds) -> None:
        """One more round, in an order turned round each time."""
        index = len(played.rounds)
        title = f"{played.contest.name}, round {index + 1}"
        answers = self._everyone(title, played.contest.of_round(index), index)
        seconds = {name: answer.seconds for name, answer in answers.items()}
        played.rounds.append(judged(self.contestants, played.contest.num_counted, seconds))

    def _everyone(self, title: str, workload: Workload, seed: int) -> dict[str, Answer]:
        """Answers by name; every second seed turns the order round."""
        answers = {}
        order = list(self.contestants)
        for contestant in order if seed % 2 == 0 else reversed(order):
            self._announce(f"{title}: {contestant.name}")
            try:
                answers[contestant.name] = contestant.generate(workload, seed, self._timeout_s)
            except PeerError as error:
                self._leave(contestant, f"{workload.name}: {error}")
        return answers

    def _leave(self, contestant: Contestant, reason: str) -> None:
        if contestant.is_ours:
            raise PeerError(f"{contestant.name}: {reason}")
        self.left_out[contestant.name] = reason
        self.contestants.remove(contestant)


def equal_share(tokens: Sequence[Sequence[int]], expected: Sequence[Sequence[int]]) -> float:
    """The share of `expected` up to each row's first other token: what follows it has to differ."""
    num_equal = 0
    for row, wanted in zip(tokens, expected, strict=True):
        for token, wanted_token in zip(row, wanted, strict=True):
            if token != wanted_token:
                break
            num_equal += 1
    return num_equal / sum(map(len, expected))
