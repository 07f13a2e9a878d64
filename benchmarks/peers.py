"""Generation beside OpenVINO GenAI, vLLM, llama.cpp and transformers on a CPU.

    python -m benchmarks.peers                              # W1 to W4 of 44M, float32, five rounds
    python -m benchmarks.peers --models 4M 44M 0.5B --dtypes float32 bfloat16 --int8
    python -m benchmarks.peers --peers openvino llama.cpp --workloads W3 --threads 2
    python -m benchmarks.peers --small --peers transformers  # shows that it runs

Each peer is installed once, in an environment of its own below --cache: minutes, and for llama.cpp
a build of a quarter of an hour. Each contestant is a process with --threads computing threads.
First all generate the same greedy tokens, then they take turns. A peer that cannot be installed or
cannot run here is listed with its reason. Writes a page, JSON and a plot for each model and dtype.
"""

from __future__ import annotations

import argparse
import datetime
import shutil
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks.machine import describe, kind
from benchmarks.models import num_parameters
from benchmarks.pages import publish
from benchmarks.peers_environments import OURS, PEERS, PeerRecipe, python_of, run_environment
from benchmarks.peers_models import MODELS, model_directory
from benchmarks.peers_process import PeerError, WorkerProcess
from benchmarks.peers_report import Comparison, as_json, as_markdown, draw
from benchmarks.peers_rounds import Contestant, ContestRounds, Tournament
from benchmarks.peers_workloads import contests
from rollout import InferenceConfig

RESULTS = Path(__file__).parent / "results"
CACHE = Path.home() / ".cache" / "rollout-bench"
WORKLOADS = ("W1", "W2", "W3", "W4")
DTYPES = ("float32", "bfloat16")


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    models = [name for name in MODELS if name != "small"]
    parser.add_argument("--models", nargs="+", choices=models, default=["44M"])
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=["float32"])
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--peers", nargs="+", choices=list(PEERS), default=list(PEERS))
    parser.add_argument("--int8", action="store_true", help="int8 peers as well, shown apart")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1, help="more than 1: wall clock counts")
    parser.add_argument("--timeout", type=float, default=900.0, help="seconds of one request")
    parser.add_argument("--small", action="store_true", help="a tiny model and workloads")
    parser.add_argument("--cache", type=Path, default=CACHE, help="environments and models")
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder of the result files")
    arguments = parser.parse_args(argv)
    for name in ("rounds", "threads", "timeout"):
        value = getattr(arguments, name)
        if value < 1:
            parser.error(f"--{name} {value} must be at least 1")
    if arguments.small:
        arguments.models = ["small"]
    return arguments


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A contestant that has not started: how it runs, and in which precision."""

    recipe: PeerRecipe
    precision: str

    @property
    def name(self) -> str:
        suffix = " int8" if self.precision == "int8" else ""
        return self.recipe.name + suffix

    def start(self, model: Path, arguments: argparse.Namespace, stack: ExitStack) -> Contestant:
        """Install it, convert the model, load it; `stack` will end its process.

        Raises PeerError.
        """
        logs = arguments.cache / "logs"
        python = python_of(self.recipe, arguments.cache, logs)
        environment = run_environment(self.recipe, arguments.threads)
        command = [str(python), "-m", self.recipe.module]
        log = logs / f"{self.name.lower().replace(' ', '-')}-{model.name}.log"
        if self.recipe.is_converted:
            with WorkerProcess(command, environment, log) as converter:
                model = self._converted(model, arguments, converter)
        worker = stack.enter_context(WorkerProcess(command, environment, log))
        request = {"verb": "load", "model": str(model), "precision": self.precision}
        worker.ask({**request, "num_threads": arguments.threads}, arguments.timeout)
        is_int8 = self.precision == "int8"
        return Contestant(
            name=self.name, worker=worker, is_ours=self.recipe is OURS, is_int8=is_int8
        )

    def _converted(
        self, model: Path, arguments: argparse.Namespace, converter: WorkerProcess
    ) -> Path:
        """The model in the peer's own form, made unless it is there."""
        folder = f"{model.name}-{self.precision}-{self.recipe.name}-{self.recipe.version}"
        target: Path = arguments.cache / "converted" / folder.lower().replace(" ", "-")
        complete = target / "complete"
        if not complete.is_file():
            shutil.rmtree(target, ignore_errors=True)
            target.mkdir(parents=True)
            folders = {"model": str(model), "target": str(target)}
            request = {"verb": "convert", **folders, "precision": self.precision}
            converter.ask(request, arguments.timeout)
            complete.touch()
        return target


def entries(arguments: argparse.Namespace, dtype: str) -> list[Entry]:
    """Ours first, then the peers, then those with weights of int8."""
    recipes = [PEERS[name] for name in arguments.peers]
    exact = [Entry(recipe=recipe, precision=dtype) for recipe in (OURS, *recipes)]
    narrow = [Entry(recipe=r, precision="int8") for r in recipes if r.is_converted]
    return exact + (narrow if arguments.int8 else [])


def compare(
    model: str, dtype: str, arguments: argparse.Namespace, progress: Progress
) -> Comparison:
    """All rounds of one model in one dtype. Raises PeerError if ours or every peer fails."""
    spec = MODELS[model]
    folder = model_directory(model, dtype, arguments.cache)
    task = progress.add_task(f"{model} {dtype}", total=arguments.rounds * len(arguments.workloads))
    left_out: dict[str, str] = {}
    all_contests = contests(spec.vocab_size, is_small=arguments.small)
    played = [ContestRounds(contest=all_contests[name]) for name in arguments.workloads]

    def announce(what: str) -> None:
        progress.update(task, description=f"{model} {dtype} {what}")

    with ExitStack() as stack:
        chosen = entries(arguments, dtype)
        started = _started(chosen, folder, arguments, stack, left_out, announce)
        tournament = Tournament(started, left_out, arguments.timeout, announce)
        shares = tournament.compare_greedy(all_contests["W1"], is_exact=dtype == "float32")
        for each in played:
            tournament.warm_up(each.contest)
            for _ in range(arguments.rounds):
                tournament.play_round(each)
                progress.advance(task)
    config = InferenceConfig(num_threads=arguments.threads, dtype=dtype)
    return Comparison(
        date=datetime.date.today().isoformat(),
        machine=describe(config),
        model=model,
        num_parameters=num_parameters(spec),
        dtype=dtype,
        clock="cpu" if arguments.threads == 1 else "wall",
        versions={e.name: e.recipe.version for e in chosen if e.name in {c.name for c in started}},
        left_out=left_out,
        equal_greedy_share=shares,
        contests=played,
    )


def _started(
    chosen: Sequence[Entry],
    model: Path,
    arguments: argparse.Namespace,
    stack: ExitStack,
    left_out: dict[str, str],
    announce: Callable[[str], None],
) -> list[Contestant]:
    """Those that can run here. Raises PeerError if ours cannot."""
    started = []
    for entry in chosen:
        announce(f"starts {entry.name}")
        try:
            started.append(entry.start(model, arguments, stack))
        except PeerError as error:
            if entry.recipe is OURS:
                raise PeerError(f"{entry.name}: {error}") from None
            left_out[entry.name] = str(error)
    return started


def write(comparison: Comparison, folder: Path, console: Console) -> Path:
    """Write and print it; returns the path of the page."""
    name = f"peers-{comparison.model}-{comparison.dtype}"
    plot = f"{comparison.date}-{name}-{kind(comparison.machine)}.png"
    page = publish(as_json(comparison), as_markdown(comparison, plot), name, folder, console)
    draw(comparison, folder / plot)
    return page


def main(argv: Sequence[str] | None = None) -> int:
    """Compare, print and write. Returns the exit code."""
    arguments = parse_arguments(argv)
    torch.set_num_threads(arguments.threads)
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    exit_code = 0
    for model in arguments.models:
        for dtype in arguments.dtypes:
            try:
                with Progress(*columns, TimeElapsedColumn(), console=console) as progress:
                    comparison = compare(model, dtype, arguments, progress)
                write(comparison, arguments.output, console)
            except PeerError as error:
                console.print(f"error: {model} {dtype}: {error}", style="red", highlight=False)
                exit_code = 1
    return exit_code


if __name__ == "__main__":
    sys.exit(main())
