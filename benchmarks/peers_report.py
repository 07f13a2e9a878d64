"""The comparison as JSON for programs, as a page for people, and as a plot."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.peers_rounds import CLOCKS, ContestRounds
from benchmarks.peers_workloads import GREEDY_TOKENS


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """One model in one dtype. `versions` and `equal_greedy_share` are by contestant; `clock` is
    the one that counts: CPU seconds with one thread, wall with more.
    """

    date: str
    machine: dict[str, str | int]
    model: str
    num_parameters: int
    dtype: str
    clock: str
    versions: dict[str, str]
    left_out: dict[str, str]
    equal_greedy_share: dict[str, float]
    contests: Sequence[ContestRounds]


def as_json(comparison: Comparison) -> dict[str, Any]:
    """Plain values; every figure of the page is among them."""
    return {
        "date": comparison.date,
        "machine": comparison.machine,
        "model": comparison.model,
        "num_parameters": comparison.num_parameters,
        "dtype": comparison.dtype,
        "clock": comparison.clock,
        "versions": comparison.versions,
        "left_out": comparison.left_out,
        "equal_greedy_share": comparison.equal_greedy_share,
        "workloads": {played.contest.name: _contest_json(played) for played in comparison.contests},
    }


def _contest_json(played: ContestRounds) -> dict[str, Any]:
    return {
        "summary": played.contest.workload.summary,
        "num_counted_tokens": played.contest.num_counted,
        "rounds": [asdict(each) for each in played.rounds],
        "median_ratio": {clock: statistics.median(played.ratios(clock)) for clock in CLOCKS},
        "smallest_ratio": {clock: min(played.ratios(clock)) for clock in CLOCKS},
        "largest_ratio": {clock: max(played.ratios(clock)) for clock in CLOCKS},
    }


def as_markdown(comparison: Comparison, plot: str) -> str:
    """A page: the machine, the ratios, a table per workload, who was left out."""
    machine = comparison.machine
    lines = [
        f"# Generation beside other engines, {comparison.date}",
        "",
        f"{machine['cpu']} (family/model {machine['cpu_family_model']}, "
        f"{machine['instruction_set']}, {machine['num_cores']} cores), "
        f"{machine['threads']} thread{'' if machine['threads'] == 1 else 's'}, "
        f"torch {machine['torch']}, Python {machine['python']}; "
        f"{machine['ops']}, {machine['attention']}.",
        "",
        f"Model {comparison.model}: {comparison.num_parameters / 1e6:.1f}M parameters, random, "
        f"{comparison.dtype}. Peers: {_versions(comparison)}. Every round runs each contestant "
        f"once, in a process of its own, on prompts of its own; a ratio is to the best peer of "
        f"its round. CPU seconds are those of all threads and processes of a contestant; wall "
        f"clock favours helper threads, and suffers from whatever else the machine does.",
        "",
        _greedy_line(comparison),
        "",
        f"![Tokens per second and ratios]({plot})",
        "",
        *_summary_lines(comparison),
    ]
    for played in comparison.contests:
        lines += ["", *_contest_lines(played)]
    if comparison.left_out:
        lines += ["", "## Left out", "", "| peer | reason |", "|---|---|"]
        lines += [
            _row(name, [reason.replace("|", "/").replace("\n", " ")])
            for name, reason in comparison.left_out.items()
        ]
    return "\n".join(lines) + "\n"


def _versions(comparison: Comparison) -> str:
    peers = list(comparison.versions.items())[1:]
    return ", ".join(f"{name} {version}" for name, version in peers)


def _greedy_line(comparison: Comparison) -> str:
    shares = comparison.equal_greedy_share
    text = ", ".join(f"{name} {share:.0%}" for name, share in shares.items())
    return (
        f"Of the first {GREEDY_TOKENS} greedy tokens per prompt, equal to ours up to the first "
        f"other one: {text}."
    )


def _summary_lines(comparison: Comparison) -> list[str]:
    lines = [
        "| ours / best peer of the round | median, CPU | range | median, wall | range | "
        f"best peer ({comparison.clock}) |",
        "|---|---:|---:|---:|---:|---|",
    ]
    for played in comparison.contests:
        cells = []
        for clock in CLOCKS:
            ratios = played.ratios(clock)
            cells += [f"{statistics.median(ratios):.2f}", f"{min(ratios):.2f}-{max(ratios):.2f}"]
        best = [each.best_peer[comparison.clock] for each in played.rounds]
        cells.append(", ".join(sorted(set(best), key=best.count, reverse=True)))
        lines.append(_row(played.contest.name, cells))
    return lines


def _contest_lines(played: ContestRounds) -> list[str]:
    contest = played.contest
    numbers = [f"round {index + 1}" for index in range(len(played.rounds))]
    lines = [f"## {contest.name}: {contest.workload.summary}"]
    for clock in CLOCKS:
        label = "CPU" if clock == "cpu" else "wall"
        lines += [
            "",
            f"| {contest.counted} tokens per {label} second | {' | '.join(numbers)} | median |",
            "|---|" + "---:|" * (len(numbers) + 1),
        ]
        for name in played.rounds[0].tokens_per_second[clock]:
            speeds = [each.tokens_per_second[clock].get(name) for each in played.rounds]
            speeds.append(played.speed(name, clock))
            lines.append(_row(name, ["-" if s is None else f"{s:.1f}" for s in speeds]))
        ratios = played.ratios(clock)
        ratios.append(statistics.median(ratios))
        lines.append(_row("**ratio**", [f"**{ratio:.2f}**" for ratio in ratios]))
    return lines


def _row(first: str, cells: Sequence[str]) -> str:
    return f"| {first} | {' | '.join(cells)} |"


def draw(comparison: Comparison, path: Path) -> None:
    """Median speeds per workload, over ours, with the range of the rounds of the ratio."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(CLOCKS), figsize=(11, 4), sharey=True)
    names = list(comparison.versions)
    width = 0.8 / len(names)
    for axis, clock in zip(axes, CLOCKS, strict=True):
        for place, name in enumerate(names):
            heights = [
                _relative_speed(played, name, names[0], clock) for played in comparison.contests
            ]
            spots = [
                index + (place - len(names) / 2 + 0.5) * width for index in range(len(heights))
            ]
            axis.bar(spots, heights, width, label=name, color=f"C{place}")
        axis.axhline(1, color="black", linewidth=0.8)
        axis.set_xticks(
            range(len(comparison.contests)), [p.contest.name for p in comparison.contests]
        )
        axis.set_title(f"by {'CPU' if clock == 'cpu' else 'wall'} time")
        axis.grid(axis="y", alpha=0.3)
    axes[0].set_ylabel("tokens per second / those of rollout")
    axes[-1].legend(fontsize=8, loc="center left", bbox_to_anchor=(1.01, 0.5))
    threads = comparison.machine["threads"]
    figure.suptitle(
        f"{comparison.model}, {comparison.dtype}, {threads} thread(s), medians of rounds"
    )
    figure.tight_layout()
    figure.savefig(path, dpi=110, metadata={"Software": None})
    pyplot.close(figure)


def _relative_speed(played: ContestRounds, name: str, ours: str, clock: str) -> float:
    """The median over rounds of a contestant's speed over ours; 0 for one that has none."""
    speeds = [each.tokens_per_second[clock] for each in played.rounds]
    ratios = [speed[name] / speed[ours] for speed in speeds if name in speed]
    return statistics.median(ratios) if ratios else 0.0
