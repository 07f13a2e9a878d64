"""Results of `benchmarks.peers`: seconds of each engine, ratios, and merging of runs.

Used by `benchmarks.peers`, `benchmarks.peers_environments`, `benchmarks.peers_rounds` and
`benchmarks.peers_report`.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

CLOCKS = ("cpu", "wall")
OUR_NAME = "rollout"
INT8_SUFFIX = " int8"

# Seconds of a round by contestant and clock.
Seconds = Mapping[str, Mapping[str, float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadResult:
    """The rounds of a workload.

    groups: the rounds of each group of peers that ran together. Our engine is in every round.
    num_counted: tokens that a round counts for the speed.
    counted: kind of the counted tokens, "output" or "prompt".
    """

    summary: str
    counted: str
    num_counted: int
    groups: list[list[Seconds]]

    @property
    def peers(self) -> list[str]:
        """Names of the peers, in the order of their first runs."""
        names = [name for group in self.groups for name in group[0]]
        return [name for name in dict.fromkeys(names) if name != OUR_NAME]

    def ratios_to(self, peer: str, clock: str) -> list[float]:
        """Return our speed over the speed of `peer`, for each round of `peer`."""
        rounds = [seconds for group in self.groups for seconds in group if peer in seconds]
        return [seconds[peer][clock] / seconds[OUR_NAME][clock] for seconds in rounds]

    def best_peers(self, clock: str) -> list[tuple[float, str]]:
        """Return, for each round, our speed over the fastest peer's, and that peer's name.

        Peers with int8 weights are left out.
        """
        peers = [name for name in self.peers if not name.endswith(INT8_SUFFIX)]
        columns = [[(ratio, peer) for ratio in self.ratios_to(peer, clock)] for peer in peers]
        return [min(cell for cell in row if cell is not None) for row in zip_longest(*columns)]

    def ratios(self, clock: str) -> list[float]:
        """Return our speed over the fastest peer's, for each round."""
        return [ratio for ratio, _ in self.best_peers(clock)]

    def speed(self, name: str, clock: str) -> float:
        """Return the median of an engine's tokens per second over its rounds."""
        rounds = [seconds for group in self.groups for seconds in group if name in seconds]
        return statistics.median(self.num_counted / seconds[name][clock] for seconds in rounds)

    def updated(self, newer: WorkloadResult) -> WorkloadResult:
        """Return this result, with the rounds of `newer` in place of earlier rounds of its
        peers."""
        kept: list[list[Seconds]] = []
        for group in self.groups:
            others = [_without(seconds, newer.peers) for seconds in group]
            kept.append([seconds for seconds in others if len(seconds) > 1])
        return replace(newer, groups=[*filter(None, kept), *newer.groups])


def _without(seconds: Seconds, names: Sequence[str]) -> Seconds:
    return {name: each for name, each in seconds.items() if name not in names}


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The results of one model in one dtype with a number of threads.

    versions: version of each peer.
    left_out: reason why a peer has no result, by peer.
    equal_greedy_share: share of our greedy tokens that a peer also generated, by peer.
    load_averages: load average of the machine at the start of each round.
    workloads: results by name of the workload.
    """

    date: str
    machine: dict[str, str | int]
    model: str
    num_parameters: int
    dtype: str
    versions: dict[str, str]
    left_out: dict[str, str]
    equal_greedy_share: dict[str, float]
    load_averages: list[float]
    workloads: dict[str, WorkloadResult]

    @property
    def key(self) -> tuple[str, str, int]:
        """Model, dtype and number of threads, which identify a comparison."""
        return self.model, self.dtype, int(self.machine["threads"])

    @property
    def clock(self) -> str:
        """The clock that counts: "cpu" for one thread, "wall" for several."""
        return "cpu" if self.machine["threads"] == 1 else "wall"

    def updated(self, newer: Comparison) -> Comparison:
        """Return this comparison, updated with a later comparison of the same key."""
        workloads = dict(self.workloads)
        for name, result in newer.workloads.items():
            workloads[name] = workloads[name].updated(result) if name in workloads else result
        played = {peer for result in workloads.values() for peer in result.peers}
        left_out = {**self.left_out, **newer.left_out}
        return replace(
            newer,
            versions={**self.versions, **newer.versions},
            left_out={name: why for name, why in left_out.items() if name not in played},
            equal_greedy_share={**self.equal_greedy_share, **newer.equal_greedy_share},
            load_averages=[*self.load_averages, *newer.load_averages],
            workloads=dict(sorted(workloads.items())),
        )


def merged(older: Sequence[Comparison], newer: Sequence[Comparison]) -> list[Comparison]:
    """Return the comparisons of both runs. Newer rounds replace older rounds of the same peer.

    The order is by threads, then dtype, then size of the model.
    """
    by_key = {comparison.key: comparison for comparison in older}
    for comparison in newer:
        before = by_key.get(comparison.key)
        by_key[comparison.key] = comparison if before is None else before.updated(comparison)
    return sorted(
        by_key.values(),
        key=lambda c: (c.machine["threads"], c.dtype != "float32", c.num_parameters),
    )


def as_json(comparisons: Sequence[Comparison]) -> dict[str, Any]:
    """Return the content of the JSON file.

    It has the latest date, and the machine of the first comparison without its number of threads.
    """
    machine = {k: v for k, v in comparisons[0].machine.items() if k != "threads"}
    date = max(comparison.date for comparison in comparisons)
    return {"date": date, "machine": machine, "comparisons": [asdict(c) for c in comparisons]}


def read_json(path: Path) -> list[Comparison]:
    """Return the comparisons of a JSON file with the content of `as_json`."""
    comparisons = []
    for values in json.loads(path.read_text())["comparisons"]:
        workloads = {name: WorkloadResult(**each) for name, each in values["workloads"].items()}
        comparisons.append(Comparison(**{**values, "workloads": workloads}))
    return comparisons
