"""Compare asynchronous with synchronous GRPO: rewards, and shares of a step's time.

    python benchmarks/async_training.py

A program, run by hand. For each seed it trains the demo of `rollout train` twice, with the same
prompts and number of steps. The engine and the trainer run in two processes. In the run "by turns"
the staleness bound is 0, so engine and trainer wait for each other. In the run "asynchronous" the
bound is 1: the engine generates a batch while the trainer trains on the batch before. The program
prints a Markdown page, and writes it and a JSON file.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import Progress

from benchmarks.one_thread import restart_with_one_thread
from benchmarks.pages import at_least_one, dated, publish, results_parser, table_row
from trainer_hooks.metrics import read_jsonl

KINDS = {"by turns": "synchronous", "asynchronous": "asynchronous"}
# Settings of both kinds. With the demo's own, 4e-4 after 5 steps of warm-up, both overshoot in the
# first 20 steps. With rollouts one version older the recovery takes longer: -0.075 at the end.
RECIPE = (
    "trainer.learning_rate=2e-4",
    "trainer.warmup_steps=10",
    "algorithm.decoupled=true",
    "engine.max_requests=1024",
)
SHARES = ("wait", "train", "update", "suspend", "resume", "checkpoint", "other")
WINDOW_STEPS = 10
WARM_STEPS = 3  # left out of the times
NUM_RESAMPLES = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFigures:
    """Figures of one run. Rewards are means of sampled rollouts.

    reward_first, reward_last: mean reward of the first and of the last WINDOW_STEPS steps.
    greedy_after: reward of greedy decoding on held-out problems at the end.
    step_s, run_s: seconds of a step (median), and of all steps.
    max_staleness: largest policy lag, in weight versions.
    shares: mean share of each part of a step's time.
    share_sum_error: largest distance from 1 of the sum of a step's shares.
    """

    kind: str
    seed: int
    reward_first: float
    reward_last: float
    greedy_after: float
    step_s: float
    run_s: float
    engine_idle_share: float
    max_staleness: float
    share_sum_error: float
    shares: dict[str, float]


def run_job(kind: str, seed: int, directory: Path, overrides: Sequence[str]) -> RunFigures:
    """Train one run in a child process, and return its figures.

    `overrides` are more settings, such as "seed=1". Raises CalledProcessError if the run fails.
    """
    subprocess.run(
        [
            sys.executable,
            *("-m", "trainer_hooks.train", "--config-name", "demo"),
            "num_engines=1",
            "weight_sync=in_flight",
            f"producer={KINDS[kind]}",
            f"seed={seed}",
            "logger=quiet",
            *RECIPE,
            f"hydra.run.dir={directory}",
            *overrides,
        ],
        check=True,
        stdout=subprocess.DEVNULL,
    )
    rows = read_jsonl(directory / f"seed_{seed}" / "metrics.jsonl")
    return figures_of(kind, seed, rows)


def figures_of(kind: str, seed: int, rows: Sequence[dict[str, float]]) -> RunFigures:
    """Return the figures of a finished run. `rows` are the lines of its metrics file."""
    steps = [row for row in rows if "reward" in row]
    timed = steps[WARM_STEPS:] or steps
    greedy = [row["eval/greedy_reward"] for row in rows if "eval/greedy_reward" in row]
    sums = [sum(v for k, v in row.items() if k.startswith("timing_share/")) for row in steps]
    return RunFigures(
        kind=kind,
        seed=seed,
        reward_first=fmean(row["reward"] for row in steps[:WINDOW_STEPS]),
        reward_last=fmean(row["reward"] for row in steps[-WINDOW_STEPS:]),
        greedy_after=greedy[-1],
        step_s=median(row["timing_s/step"] for row in timed),
        run_s=sum(row["timing_s/step"] for row in steps),
        engine_idle_share=fmean(row["engine/idle_share"] for row in timed),
        max_staleness=max(row["policy_staleness/max"] for row in steps),
        share_sum_error=max(abs(total - 1.0) for total in sums),
        shares={name: fmean(row[f"timing_share/{name}"] for row in timed) for name in SHARES},
    )


def bootstrap_interval(differences: Sequence[float]) -> tuple[float, float]:
    """Return the 90% bootstrap interval of the mean of per-seed differences."""
    rng = np.random.default_rng(0)
    draws = rng.choice(differences, size=(NUM_RESAMPLES, len(differences))).mean(axis=1)
    low, high = np.quantile(draws, [0.05, 0.95])
    return float(low), float(high)


def as_markdown(results: dict[str, Any]) -> str:
    """Return a Markdown page with a row per run, then the comparison."""
    summary, machine = results["summary"], results["machine"]
    heads = ["", "seed", "reward, first steps", "last steps", "greedy", "s/step", "engine idle"]
    heads += ["largest lag", "shares' sum - 1", *SHARES]
    lines = [
        f"# Asynchronous training, {results['date']}",
        "",
        f"{machine['cpu']}, {machine['num_cores']} cores; a thread for the engine and one for the "
        f"trainer; torch {machine['torch']}. GRPO on reasoning-gym's palindromes by "
        f"rollout train --config-name demo {' '.join(results['overrides'])}. "
        f"Rewards: means over the first and the last {WINDOW_STEPS} steps, as sampled; greedy: on "
        "held-out problems at the end. Times: medians over steps; shares of the trainer's: means.",
        "",
        table_row(heads),
        f"|{'---|' * len(heads)}",
    ]
    for run in results["runs"]:
        numbers = [run[key] for key in ("reward_first", "reward_last", "greedy_after")]
        cells = [run["kind"], str(run["seed"]), *(f"{number:.3f}" for number in numbers)]
        cells += [f"{run['step_s']:.2f}", f"{run['engine_idle_share']:.0%}"]
        cells += [f"{run['max_staleness']:.0f}", f"{run['share_sum_error']:.0e}"]
        cells += [f"{run['shares'][name]:.0%}" for name in SHARES]
        lines.append(table_row(cells))
    low, high = summary["bootstrap_90"]
    return "\n".join(
        [
            *lines,
            "",
            f"Asynchronous less by turns, reward of the last steps: "
            f"{summary['mean_reward_difference']:+.3f} (bootstrap 90%: {low:+.3f} to {high:+.3f}); "
            f"greedy: {summary['mean_greedy_difference']:+.3f}. A step by turns takes "
            f"{summary['speedup']:.2f} times as long.",
            "",
        ]
    )


def summary_of(figures: Sequence[RunFigures]) -> dict[str, Any]:
    """Return the differences between the two kinds of runs, paired by seed."""
    by_kind = {k: [run for run in figures if run.kind == k] for k in KINDS}
    pairs = list(zip(by_kind["asynchronous"], by_kind["by turns"], strict=True))
    differences = [a.reward_last - b.reward_last for a, b in pairs]
    return {
        "mean_reward_difference": fmean(differences),
        "bootstrap_90": bootstrap_interval(differences),
        "mean_greedy_difference": fmean(a.greedy_after - b.greedy_after for a, b in pairs),
        "speedup": median(b.step_s / a.step_s for a, b in pairs),
    }


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Run the benchmark, print and write the results, and return them."""
    parser = results_parser(__doc__)
    parser.add_argument("--seeds", type=at_least_one, default=3)
    parser.add_argument("overrides", nargs="*", help="settings of the demo, as key=value")
    arguments = parser.parse_args(argv)
    console, figures = Console(stderr=True), []
    with tempfile.TemporaryDirectory() as directory, Progress(console=console) as progress:
        task = progress.add_task("runs", total=2 * arguments.seeds)
        for seed in range(arguments.seeds):
            for kind in KINDS:
                where = Path(directory) / KINDS[kind]
                figures.append(run_job(kind, seed, where, arguments.overrides))
                progress.advance(task)
    results = {
        **dated(),
        "overrides": [*RECIPE, *arguments.overrides],
        "summary": summary_of(figures),
        "runs": [asdict(run) for run in figures],
    }
    publish(results, as_markdown(results), "async-training", arguments.output, console)
    return results


if __name__ == "__main__":
    restart_with_one_thread()
    main()
