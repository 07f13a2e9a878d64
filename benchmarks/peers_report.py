"""Formats the results of `benchmarks.peers` as a Markdown page and a plot.

Used by `benchmarks.peers`. `draw` writes the plot's file.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from benchmarks.pages import table_row
from benchmarks.peers_results import CLOCKS, OUR_NAME, Comparison, WorkloadResult, as_json
from benchmarks.peers_rounds import FAR_BEHIND
from benchmarks.peers_workloads import GREEDY_TOKENS

_CLOCK_TITLES = {"cpu": "CPU", "wall": "wall"}


def as_markdown(comparisons: Sequence[Comparison], plot: str) -> str:
    """Return the page: the machine, a table of all ratios, then the rounds of each comparison."""
    machine, date = comparisons[0].machine, as_json(comparisons)["date"]
    lines = [
        f"# Generation beside other engines, {date}",
        "",
        f"{machine['cpu']} (family/model {machine['cpu_family_model']}, "
        f"{machine['instruction_set']}, {machine['num_cores']} cores), torch {machine['torch']}, "
        f"Python {machine['python']}; {machine['ops']}, {machine['attention']}. Random weights.",
        "",
        "Every round runs each contestant once, in a process of its own, on prompts of its own; a "
        "ratio is our speed over that of the best peer of its round. A peer more than "
        f"{FAR_BEHIND} times slower than the best one plays the first round only. Of a model of "
        "more than 200M parameters, one peer at a time is in memory beside ours, and each has "
        "rounds of its own with ours. CPU seconds are those of all threads and processes of a "
        "contestant; wall clock favours helper threads, and suffers from whatever else the "
        "machine does. The clock that counts is CPU with one thread, wall with more.",
        "",
        f"![Our speed over that of each peer]({plot})",
        "",
        *summary_lines(comparisons),
    ]
    for comparison in comparisons:
        lines += ["", *_comparison_lines(comparison)]
    return "\n".join(lines) + "\n"


def summary_lines(comparisons: Sequence[Comparison]) -> list[str]:
    """Return a table with the ratio of our speed to the best peer's, for each workload."""
    lines = [
        "| model | dtype | threads | | ours / best peer, CPU | range | wall | range | best peer |",
        "|---|---|---:|---|---:|---:|---:|---:|---|",
    ]
    for comparison in comparisons:
        model, dtype, num_threads = comparison.key
        for name, result in comparison.workloads.items():
            cells = [model, dtype, str(num_threads), name]
            for clock in CLOCKS:
                ratios = result.ratios(clock)
                median = f"{statistics.median(ratios):.2f}"
                cells.append(f"**{median}**" if clock == comparison.clock else median)
                cells.append(f"{min(ratios):.2f}-{max(ratios):.2f}")
            best = [peer for _, peer in result.best_peers(comparison.clock)]
            cells.append(", ".join(sorted(set(best), key=best.count, reverse=True)))
            lines.append(table_row(cells))
    return lines


def _comparison_lines(comparison: Comparison) -> list[str]:
    model, dtype, num_threads = comparison.key
    versions = ", ".join(f"{name} {version}" for name, version in comparison.versions.items())
    shares = comparison.equal_greedy_share.items()
    loads = comparison.load_averages
    lines = [
        f"## {model}, {dtype}, {num_threads} thread{'' if num_threads == 1 else 's'}",
        "",
        f"{comparison.num_parameters / 1e6:.1f}M parameters. Peers: {versions}. Load average of "
        f"the machine {min(loads):.1f} to {max(loads):.1f}. Of the first {GREEDY_TOKENS} greedy "
        "tokens per prompt, equal to ours up to the first other one: "
        + ", ".join(f"{name} {share:.0%}" for name, share in shares)
        + ".",
    ]
    for name, result in comparison.workloads.items():
        lines += ["", f"**{name}**: {result.summary}.", "", *_workload_lines(result)]
    if comparison.left_out:
        lines += ["", "| left out | reason |", "|---|---|"]
        lines += [
            table_row([name, reason.replace("|", "/").replace("\n", " ")])
            for name, reason in comparison.left_out.items()
        ]
    return lines


def _workload_lines(result: WorkloadResult) -> list[str]:
    """Return a table of the ratios by peer and round, with their medians and the median speed."""
    num_rounds = len(result.ratios("cpu"))
    numbers = [f"round {index + 1}" for index in range(num_rounds)]
    header = ["ours over", "clock", *numbers, "median", f"{result.counted} tokens/s"]
    lines = [table_row(header), "|---|---|" + "---:|" * (num_rounds + 2)]
    for clock in CLOCKS:
        title = _CLOCK_TITLES[clock]
        for peer in result.peers:
            cells = _ratio_cells(result.ratios_to(peer, clock), num_rounds)
            lines.append(table_row([peer, title, *cells, f"{result.speed(peer, clock):.1f}"]))
        cells = [f"**{cell}**" for cell in _ratio_cells(result.ratios(clock), num_rounds)]
        speed = f"ours: {result.speed(OUR_NAME, clock):.1f}"
        lines.append(table_row(["**the best**", title, *cells, speed]))
    return lines


def _ratio_cells(ratios: Sequence[float], num_rounds: int) -> list[str]:
    """Return a cell for each round, empty if the round is missing, then the median."""
    cells = [f"{ratio:.2f}" for ratio in ratios] + [""] * (num_rounds - len(ratios))
    return [*cells, f"{statistics.median(ratios):.2f}"]


def draw(comparisons: Sequence[Comparison], path: Path) -> None:
    """Write a plot to `path`: the ratio of our speed to each peer's speed.

    Bars show the median over rounds, with the range.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.patches import Patch

    rows = [list(group) for _, group in groupby(comparisons, key=lambda c: c.key[1:])]
    figure, axes = pyplot.subplots(len(rows), 1, figsize=(11, 3.2 * len(rows)), squeeze=False)
    results = [result for c in comparisons for result in c.workloads.values()]
    peers = list(dict.fromkeys(peer for result in results for peer in result.peers))
    for axis, row in zip(axes[:, 0], rows, strict=True):
        _draw_row(axis, row, peers)
    colors = [Patch(color=f"C{place}", label=peer) for place, peer in enumerate(peers)]
    axes[0, 0].legend(handles=colors, fontsize=8, loc="center left", bbox_to_anchor=(1.01, 0.5))
    figure.tight_layout()
    figure.savefig(path, dpi=110, metadata={"Software": None})
    pyplot.close(figure)


def _draw_row(axis: Any, row: Sequence[Comparison], peers: Sequence[str]) -> None:
    """Draw the comparisons of one dtype and number of threads side by side."""
    _, dtype, num_threads = row[0].key
    spots = [
        (f"{comparison.model} {name}", comparison.clock, result)
        for comparison in row
        for name, result in comparison.workloads.items()
    ]
    width = 0.8 / len(peers)
    for spot, (_, clock, result) in enumerate(spots):
        for place, peer in enumerate(result.peers):
            ratios = result.ratios_to(peer, clock)
            middle = statistics.median(ratios)
            axis.bar(
                spot + (place - (len(result.peers) - 1) / 2) * width,
                middle,
                width,
                yerr=[[middle - min(ratios)], [max(ratios) - middle]],
                ecolor="gray",
                color=f"C{peers.index(peer)}",
            )
    axis.set_xlim(-0.6, len(spots) - 0.4)
    axis.set_xticks(range(len(spots)), [title for title, _, _ in spots])
    axis.axhline(1, color="black", linewidth=0.8)
    axis.grid(axis="y", alpha=0.3)
    axis.set_ylabel("ours / peer")
    axis.set_title(f"{dtype}, {num_threads} thread(s), by {_CLOCK_TITLES[row[0].clock]} time")
