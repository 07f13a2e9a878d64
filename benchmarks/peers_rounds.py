"""Runs interleaved rounds of several engines, each in a child process.

Used by `benchmarks.peers`, `benchmarks.peers_environments` and `benchmarks.peers_report`.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Protocol

from benchmarks.peers_process import PeerError, WorkerProcess
from benchmarks.peers_results import CLOCKS, Seconds, WorkloadResult
from benchmarks.peers_workloads import Contest, greedy_workload
from benchmarks.workloads import Workload

# A peer that is more than this many times slower than the best peer, by both clocks, runs only one
# round of a workload. Peers with int8 weights run all rounds.
FAR_BEHIND = 1.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Contestant:
    """A process that has loaded the model.

    is_int8: whether its weights are int8. Then its tokens may differ from ours.
    """

    name: str
    worker: WorkerProcess
    is_int8: bool = False

    def generate(self, workload: Workload, seed: int, timeout_s: float) -> Answer:
        """Run the workload in the process, and return its samples and times.

        Raises PeerError if the process fails or takes longer than `timeout_s`.
        """
        request = {"method": "generate", "workload": asdict(workload), "seed": seed}
        reply = self.worker.ask(request, timeout_s)
        return Answer(
            tokens=reply["tokens"],
            seconds={clock: reply[f"{clock}_seconds"] for clock in CLOCKS},
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Tokens of each sample of a workload, and the seconds that the workload took.

    seconds: by clock. "cpu" adds all threads and processes of the engine. "wall" is elapsed time.
    """

    tokens: list[list[int]]
    seconds: dict[str, float]


class Display(Protocol):
    """A display of the progress of the rounds."""

    def show(self, text: str) -> None:
        """Show what runs now."""
        ...

    def advance(self, contest: Contest, num_plays: int) -> None:
        """Count `num_plays` runs of an engine that have ended or that never take place."""
        ...


class Tournament:
    """Runs rounds of our engine with each group of peers, and keeps the results.

    results: results by name of the workload.
    left_out: reason why a peer runs no more rounds, by peer.
    equal_greedy_share: share of our greedy tokens that a peer also generated, by peer.
    load_averages: load average of the machine at the start of each round.
    """

    def __init__(
        self,
        ours: Contestant,
        contests: Sequence[Contest],
        *,
        num_rounds: int,
        is_exact: bool,
        timeout_s: float,
        display: Display,
    ) -> None:
        self.left_out: dict[str, str] = {}
        self.equal_greedy_share: dict[str, float] = {}
        self.load_averages: list[float] = []
        self.results = {
            contest.name: WorkloadResult(
                summary=contest.workload.summary,
                counted=contest.counted,
                num_counted=contest.num_counted,
                groups=[],
            )
            for contest in contests
        }
        self._ours, self._contests, self._num_rounds = ours, contests, num_rounds
        self._is_exact, self._timeout_s, self._display = is_exact, timeout_s, display

    def play(self, group: Sequence[Contestant]) -> None:
        """Run all rounds of these peers. Raises PeerError if our engine fails."""
        peers = self._with_equal_tokens(group) if group else []
        for contest in self._contests:
            num_plays = self._play_rounds(contest, peers) if peers else 0
            self._display.advance(contest, self._num_rounds * (1 + len(group)) - num_plays)
            peers = self._remaining(peers)

    def _with_equal_tokens(self, group: Sequence[Contestant]) -> list[Contestant]:
        """Compare greedy tokens with ours, and return the peers that stay.

        In float32, peers with different tokens are left out, unless their weights are int8.
        """
        # In bfloat16, rounding may decide between two likely tokens.
        answers = self._everyone("greedy", greedy_workload(self._contests[0]), 0, group)
        ours = answers[self._ours.name].tokens
        for peer in self._remaining(group):
            share = equal_share(answers[peer.name].tokens, ours)
            self.equal_greedy_share[peer.name] = share
            if self._is_exact and not peer.is_int8 and share < 1:
                self.left_out[peer.name] = f"only {share:.0%} of its greedy tokens are ours"
        return self._remaining(group)

    def _play_rounds(self, contest: Contest, peers: Sequence[Contestant]) -> int:
        """Run the rounds of `peers`, add them to the results, and return the number of runs.

        A peer far behind the best peer runs only the first round, unless its weights are int8.
        """
        result, num_plays = self.results[contest.name], 0
        rounds: list[Seconds] = []
        # The warm-up builds what an engine builds at its first use.
        self._everyone(f"{contest.name}: warm-up", contest.warm_up(), 0, peers)
        peers = self._remaining(peers)
        for index in range(self._num_rounds):
            if not peers:
                break
            self.load_averages.append(round(os.getloadavg()[0], 2))
            title = f"{contest.name}, round {index + 1}"
            answers = self._everyone(title, contest.of_round(index), index, peers)
            self._display.advance(contest, len(answers))
            num_plays += len(answers)
            peers = self._remaining(peers)
            if peers:
                rounds.append({name: answer.seconds for name, answer in answers.items()})
            if peers and index == 0:
                result.groups.append(rounds)
                peers = [peer for peer in peers if peer.is_int8 or _is_near(result, peer.name)]
        return num_plays

    def _everyone(
        self, title: str, workload: Workload, seed: int, peers: Sequence[Contestant]
    ) -> dict[str, Answer]:
        """Run the workload on our engine and all peers, and return the answers by name.

        The order is reversed for odd seeds. A peer that fails is added to `left_out`. Raises
        PeerError if our engine fails.
        """
        answers = {}
        order = [self._ours, *peers]
        for contestant in order if seed % 2 == 0 else reversed(order):
            self._display.show(f"{title}: {contestant.name}")
            try:
                answers[contestant.name] = contestant.generate(workload, seed, self._timeout_s)
            except PeerError as error:
                reason = f"{workload.name}: {error}"
                if contestant is self._ours:
                    raise PeerError(f"{contestant.name}: {reason}") from None
                self.left_out[contestant.name] = reason
        return answers

    def _remaining(self, peers: Sequence[Contestant]) -> list[Contestant]:
        return [peer for peer in peers if peer.name not in self.left_out]


def _is_near(result: WorkloadResult, peer: str) -> bool:
    """Return whether `peer` is at most FAR_BEHIND times slower than the fastest peer, by a clock.

    Compares the first rounds.
    """
    return any(
        result.ratios_to(peer, clock)[0] <= FAR_BEHIND * result.ratios(clock)[0] for clock in CLOCKS
    )


def equal_share(tokens: Sequence[Sequence[int]], expected: Sequence[Sequence[int]]) -> float:
    """Return the share of `expected` tokens before the first different token of each row."""
    num_equal = 0  # tokens after a different token depend on it
    for row, wanted in zip(tokens, expected, strict=True):
        for token, wanted_token in zip(row, wanted, strict=True):
            if token != wanted_token:
                break
            num_equal += 1
    return num_equal / sum(map(len, expected))
