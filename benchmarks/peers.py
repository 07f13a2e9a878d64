"""Compare generation with OpenVINO GenAI, vLLM, llama.cpp and transformers on a CPU.

    python -m benchmarks.peers                         # everything, more than an hour
    python -m benchmarks.peers --models 4M --dtypes float32 --threads 1              # three minutes
    python -m benchmarks.peers --peers openvino llama.cpp --workloads W3
    python -m benchmarks.peers --merge A.json B.json   # merge earlier results, measure nothing
    python -m benchmarks.peers --small --peers transformers                   # shows that it runs

A program, run by hand. A peer is another engine. Each engine runs in a child process, with the same
number of threads, and the engines take turns. The first run installs each peer in an environment of
its own below --cache, which takes minutes. In float32, a peer is left out if its greedy tokens
differ from ours. A peer that does not install or run here is listed with the reason.

After each model and dtype, the program writes a Markdown page, a JSON file and a plot to --output.
A later run on the same day replaces only the results that it measures again.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import torch
from rich.console import Console
from rich.markdown import Markdown
from rich.progress import (
    BarColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from benchmarks.models import num_parameters
from benchmarks.pages import at_least_one, dated, page_path, results_parser, write_page
from benchmarks.peers_environments import PEERS, Entry, entries, in_groups
from benchmarks.peers_models import MODELS, model_directory
from benchmarks.peers_process import PeerError
from benchmarks.peers_report import as_markdown, draw, summary_lines
from benchmarks.peers_results import Comparison, as_json, merged, read_json
from benchmarks.peers_rounds import Contestant, Tournament
from benchmarks.peers_workloads import Contest, Size, contests
from rollout import InferenceConfig

CACHE = Path.home() / ".cache" / "rollout-bench"
WORKLOADS = ("W1", "W2", "W3", "W4")
DTYPES = ("float32", "bfloat16")
LARGE = "0.5B"
_START_S = 30.0  # for a contestant to load, compile and warm up


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = results_parser(__doc__, rounds=5, small="a tiny model and workloads")
    models = [name for name in MODELS if name != "small"]
    parser.add_argument("--models", nargs="+", choices=models, default=models)
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument(
        "--threads", nargs="+", type=at_least_one, default=[1, 2], help="2: by wall clock"
    )
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, help="default: as time allows")
    parser.add_argument("--peers", nargs="+", choices=list(PEERS), default=list(PEERS))
    parser.add_argument("--int8", action="store_true", help="int8 peers as well, shown apart")
    parser.add_argument("--timeout", type=float, default=900.0, help="seconds of one request")
    parser.add_argument("--merge", nargs="+", type=Path, metavar="JSON", help="measure nothing")
    parser.add_argument("--cache", type=Path, default=CACHE, help="folder of models, environments")
    arguments = parser.parse_args(argv)
    for path in arguments.merge or []:
        if not path.is_file():
            parser.error(f"--merge {path} is not a file; give JSON files of earlier runs")
    if arguments.timeout < 1:
        parser.error(f"--timeout {arguments.timeout} must be at least 1")
    if arguments.small:
        arguments.models, arguments.dtypes, arguments.threads = ["small"], ["float32"], [1]
    return arguments


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One model in one dtype with a number of threads, and the engines to compare.

    contests: the workloads.
    ours: our engine.
    groups: the peers. All peers of one group are in memory at the same time.
    """

    model: str
    dtype: str
    num_threads: int
    contests: Sequence[Contest]
    ours: Entry
    groups: Sequence[Sequence[Entry]]

    @property
    def name(self) -> str:
        return f"{self.model} {self.dtype}, {self.num_threads} thread(s)"

    @property
    def num_parameters(self) -> int:
        return num_parameters(MODELS[self.model])

    def play_seconds(self, contest: Contest) -> float:
        """Return the estimated seconds of one engine in one round."""
        return contest.estimated_seconds(self.num_parameters, self.num_threads)

    def rounds_seconds(self, num_rounds: float) -> float:
        """Return the estimated seconds of all rounds, if every engine plays all rounds."""
        num_plays = num_rounds * sum(1 + len(group) for group in self.groups)
        return num_plays * sum(self.play_seconds(contest) for contest in self.contests)

    def total_seconds(self, num_rounds: int) -> float:
        """Return the estimated seconds with all starts, if half of the peers stop early."""
        num_starts = 1 + sum(len(group) for group in self.groups)
        return self.rounds_seconds(1 + (num_rounds - 1) / 2) + _START_S * num_starts


def lines(arguments: argparse.Namespace) -> list[Line]:
    """Return the lines that the command-line arguments select."""
    chosen = []
    for num_threads, model, dtype in product(arguments.threads, arguments.models, arguments.dtypes):
        names = arguments.workloads or _default_workloads(model, num_threads)
        if not names:
            continue
        size: Size = "reduced" if model == LARGE else "full"
        known = contests(MODELS[model].vocab_size, "small" if arguments.small else size)
        ours, *peers = entries(arguments.peers, dtype, has_int8=arguments.int8)
        chosen.append(
            Line(
                model=model,
                dtype=dtype,
                num_threads=num_threads,
                contests=[known[name] for name in names],
                ours=ours,
                groups=in_groups(peers, num_parameters(MODELS[model])),
            )
        )
    return chosen


def _default_workloads(model: str, num_threads: int) -> Sequence[str]:
    """Return the workloads that run without --workloads. Slow models have fewer or none."""
    if num_threads == 1:
        return ("W1", "W3") if model == LARGE else WORKLOADS
    return () if model == LARGE else ("W1", "W2")


class LineDisplay:
    """A progress bar in estimated seconds. Implements `Display` of `benchmarks.peers_rounds`."""

    def __init__(self, progress: Progress, line: Line, num_rounds: int) -> None:
        self._progress, self._line = progress, line
        total = line.rounds_seconds(num_rounds)
        self._task: TaskID = progress.add_task(line.name, total=total)

    def show(self, text: str) -> None:
        """Show which engine runs now."""
        self._progress.update(self._task, description=f"{self._line.name}: {text}")

    def advance(self, contest: Contest, num_plays: int) -> None:
        """Advance the bar by `num_plays` runs of an engine."""
        self._progress.advance(self._task, num_plays * self._line.play_seconds(contest))


def compare(line: Line, arguments: argparse.Namespace, progress: Progress) -> Comparison:
    """Play all rounds of a line, and return the results.

    Raises PeerError if our engine fails or a workload has no peer left.
    """
    torch.set_num_threads(line.num_threads)
    tournament = _play(line, arguments, LineDisplay(progress, line, arguments.rounds))
    for name, result in tournament.results.items():
        if not result.groups:
            raise PeerError(f"{name}: no peer is left to compare with: {tournament.left_out}")
    played = {name for result in tournament.results.values() for name in result.peers}
    peers = [entry for group in line.groups for entry in group]
    return Comparison(
        **dated(InferenceConfig(num_threads=line.num_threads, dtype=line.dtype)),
        model=line.model,
        num_parameters=line.num_parameters,
        dtype=line.dtype,
        versions={peer.name: peer.recipe.version for peer in peers if peer.name in played},
        left_out=tournament.left_out,
        equal_greedy_share=tournament.equal_greedy_share,
        load_averages=tournament.load_averages,
        workloads=tournament.results,
    )


def _play(line: Line, arguments: argparse.Namespace, display: LineDisplay) -> Tournament:
    """Start our engine, then one group of peers after another, and play their rounds.

    The peers of a group end before the next group starts.
    """
    folder = model_directory(line.model, line.dtype, arguments.cache)

    def start(entry: Entry, stack: ExitStack) -> Contestant:
        display.show(f"starts {entry.name}")
        return entry.start(folder, line.num_threads, arguments, stack)

    with ExitStack() as stack:
        tournament = Tournament(
            start(line.ours, stack),
            line.contests,
            num_rounds=arguments.rounds,
            is_exact=line.dtype == "float32",
            timeout_s=arguments.timeout,
            display=display,
        )
        for group in line.groups:
            with ExitStack() as group_stack:
                started = []
                for entry in group:
                    try:
                        started.append(start(entry, group_stack))
                    except PeerError as error:
                        tournament.left_out[entry.name] = str(error)
                tournament.play(started)
    return tournament


def write(comparisons: Sequence[Comparison], arguments: argparse.Namespace) -> Path:
    """Merge `comparisons` into the page, JSON file and plot of their day, and return the page's
    path."""
    name = "peers-small" if arguments.small else "peers"
    path = page_path(as_json(comparisons), name, arguments.output)
    earlier = read_json(path.with_suffix(".json")) if path.with_suffix(".json").is_file() else []
    together = merged(earlier, comparisons)
    plot = path.with_suffix(".png")
    write_page(as_json(together), as_markdown(together, plot.name), path)
    draw(together, plot)
    return path


def measure(arguments: argparse.Namespace, console: Console) -> tuple[list[Comparison], int]:
    """Measure line by line, and write the results after each line.

    Returns the comparisons and the number of failed lines.
    """
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    comparisons, num_failed = [], 0
    for line in lines(arguments):
        try:
            with Progress(*columns, TimeRemainingColumn(), console=console) as progress:
                comparison = compare(line, arguments, progress)
        except PeerError as error:
            console.print(f"error: {line.name}: {error}", style="red", highlight=False)
            num_failed += 1
            continue
        comparisons.append(comparison)
        path = write([comparison], arguments)
        console.print(f"written: {path}, its JSON and plot", highlight=False)
    return comparisons, num_failed


def estimate_table(arguments: argparse.Namespace) -> Table:
    """Return a table with the estimated minutes of each line."""
    table = Table("model, dtype, threads", "workloads", "minutes, about")
    total = 0.0
    for line in lines(arguments):
        names = " ".join(contest.name for contest in line.contests)
        minutes = line.total_seconds(arguments.rounds) / 60
        table.add_row(line.name, names, f"{minutes:.0f}")
        total += minutes
    table.add_row("all", "", f"{total:.0f}")
    return table


def main(argv: Sequence[str] | None = None) -> int:
    """Compare the engines, print and write the results, and return the exit status."""
    arguments = parse_arguments(argv)
    # SIGTERM raises an exception, so that the contestants' processes end too.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    console = Console(stderr=True)
    num_failed = 0
    if arguments.merge:
        comparisons: list[Comparison] = []
        for path in arguments.merge:
            comparisons = merged(comparisons, read_json(path))
        console.print(f"written: {write(comparisons, arguments)}", highlight=False)
    else:
        console.print(estimate_table(arguments))
        comparisons, num_failed = measure(arguments, console)
    if comparisons:
        Console().print(Markdown("\n".join(summary_lines(comparisons))))
    return 1 if num_failed else 0


if __name__ == "__main__":
    sys.exit(main())
