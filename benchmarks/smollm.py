"""Train SmolLM2 by GRPO on two tasks with several seeds, and compare four ways to train.

    python -m benchmarks.smollm                          # all runs, minutes each on two cores
    python -m benchmarks.smollm --kinds reversal --seeds 1
    python -m benchmarks.smollm --directory DIR          # only the runs that DIR lacks

A program, run by hand. The ways are synchronous, asynchronous, LoRA, and shuffled rewards as a
control. Each run is a child process, `rollout train --config-name smollm`, which writes into the
directory. The program prints Markdown tables. It draws docs/images/smollm.png if both tasks and
the control were run.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.progress import track

from benchmarks.pages import at_least_one, table_row
from trainer_hooks.metrics import read_jsonl
from trainer_hooks.train.plots import plot_curve
from trainer_hooks.train.run_results import band_note, read_runs

ROOT = Path(__file__).parents[1]
PLOT = ROOT / "docs" / "images" / "smollm.png"
_DIGITS = ("data=digits", "algorithm.max_new_tokens=8", "trainer.num_steps=20")
# Overrides of each kind of run, and whether it is repeated with other seeds.
KINDS: dict[str, tuple[tuple[str, ...], bool]] = {
    "reversal": ((), True),
    "shuffled_rewards": (("algorithm.shuffle_rewards=true",), False),
    "synchronous": (("mode=sync",), False),
    "asynchronous": (("mode=async",), False),
    "lora": (("model.lora.rank=16", "model.lora.alpha=32", "trainer.learning_rate=2e-4"), False),
    "digits": (_DIGITS, True),
}
TITLES = {"reversal": "reverse four words", "digits": "number words to digits"}
PARTS = ("generate", "train", "update", "suspend", "resume", "wait")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Wall and CPU seconds of a run's process, and its peak memory in MiB."""

    wall_s: float
    cpu_s: float
    peak_mib: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A finished run.

    exact: share of exact greedy answers, by step.
    parts_s: seconds of all steps in each of PARTS, without evaluations.
    """

    kind: str
    seed: int
    exact: dict[int, float]
    parts_s: dict[str, float]
    cost: Cost

    @classmethod
    def read(cls, kind: str, seed: int, directory: Path) -> Run:
        """Read a run from its files in `directory`."""
        rows = read_jsonl(directory / "metrics.jsonl")
        summary = json.loads((directory / "summary.json").read_text())
        return cls(
            kind=kind,
            seed=seed,
            exact={r["trainer/step"]: r["eval/exact"] for r in rows if "eval/exact" in r},
            parts_s={part: summary[f"{part}_s"] for part in PARTS},
            cost=Cost(**json.loads((directory / "cost.json").read_text())),
        )


def run_of(kind: str, seed: int, directory: Path) -> Run:
    """Return the run of this kind and seed. Makes it in `directory`, unless it is complete there.

    Raises CalledProcessError if the job fails. The job's output is then in `directory`.
    """
    own = directory / "outputs" / "train" / kind / f"seed_{seed}"
    if not (own / "cost.json").exists():
        overrides, _ = KINDS[kind]
        command = [sys.executable, "-m", "rollout", "train", "--config-name", "smollm"]
        command += [f"run_name={kind}", f"seed={seed}", *overrides]
        with (directory / f"{kind}_{seed}.txt").open("ab") as output:
            start = time.perf_counter()
            process = subprocess.Popen(command, cwd=directory, stdout=output, stderr=output)
            _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            raise subprocess.CalledProcessError(process.returncode, command)
        cost = Cost(
            wall_s=time.perf_counter() - start,
            cpu_s=usage.ru_utime + usage.ru_stime,
            peak_mib=usage.ru_maxrss >> 10,
        )
        (own / "cost.json").write_text(json.dumps(asdict(cost)))
    return Run.read(kind, seed, own)


def tables(runs: Sequence[Run]) -> str:
    """Return two Markdown tables.

    The first has results and cost of each run. The second has the share of time in each of PARTS,
    by kind of run.
    """
    lines = ["| run | seed | exact before | after | minutes | CPU minutes | peak memory, GiB |"]
    lines.append("|---|---:|---:|---:|---:|---:|---:|")
    for run in runs:
        (_, before), *_, (_, after) = sorted(run.exact.items())
        cost = run.cost
        cells = [run.kind.replace("_", " "), str(run.seed), f"{before:.0%}", f"{after:.0%}"]
        figures = (cost.wall_s / 60, cost.cpu_s / 60, cost.peak_mib / 1024)
        lines.append(table_row([*cells, *(f"{figure:.1f}" for figure in figures)]))
    lines += ["", table_row(["run", *PARTS]), f"|---|{'---:|' * len(PARTS)}"]
    by_kind: dict[str, dict[str, float]] = defaultdict(lambda: dict.fromkeys(PARTS, 0.0))
    for run in runs:
        for part, seconds in run.parts_s.items():
            by_kind[run.kind][part] += seconds
    for kind, parts in by_kind.items():
        shares = [f"{seconds / sum(parts.values()):.0%}" for seconds in parts.values()]
        lines.append(table_row([kind.replace("_", " "), *shares]))
    return "\n".join(lines)


def draw(directory: Path, path: Path) -> None:
    """Draw the share of exact held-out answers over the steps.

    Each task shows the mean and range of its seeds. The first task also shows the control.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import PercentFormatter

    figure = Figure(figsize=(9, 3.2), layout="constrained")
    axes_of = figure.subplots(1, len(TITLES), sharey=True)
    for axes, (task, title) in zip(axes_of, TITLES.items(), strict=True):
        (run,) = read_runs([directory / "outputs" / "train" / task])
        plot_curve(axes, run, "eval/exact", label=band_note([run]) or "one seed")
        if task == "reversal":
            (control,) = read_runs([directory / "outputs" / "train" / "shuffled_rewards"])
            grey = {"color": "gray", "linestyle": "--"}
            plot_curve(axes, control, "eval/exact", label="shuffled rewards", **grey)
        axes.set(title=title, xlabel="step", ylim=(0, 1))
        axes.yaxis.set_major_formatter(PercentFormatter(1.0))
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.grid(alpha=0.3)
        axes.legend(frameon=False, fontsize="x-small", loc="lower right", bbox_to_anchor=(1, 0.3))
    axes_of[0].set_ylabel("exact greedy answers, 200 held-out")
    figure.savefig(path, dpi=130, metadata={"Software": None})


def main(argv: Sequence[str] | None = None) -> None:
    """Make the missing runs, and print the tables. Draws the plot if its runs are complete."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--directory", type=Path, default=ROOT / "outputs" / "smollm")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS), metavar="KIND")
    parser.add_argument("--seeds", type=at_least_one, default=3, help="for reversal and digits")
    arguments = parser.parse_args(argv)
    directory = arguments.directory.resolve()
    directory.mkdir(parents=True, exist_ok=True)
    wanted = [
        (kind, seed)
        for kind in arguments.kinds
        for seed in range(arguments.seeds if KINDS[kind][1] else 1)
    ]
    runs = [run_of(kind, seed, directory) for kind, seed in track(wanted, "runs")]
    print(tables(runs))
    if {run.kind for run in runs} >= {*TITLES, "shuffled_rewards"}:
        draw(directory, PLOT)


if __name__ == "__main__":
    main()
