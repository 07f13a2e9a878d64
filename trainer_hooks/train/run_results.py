"""RunResults: what the seeds of a finished or running run have written, for reports and figures.

Used by `trainer_hooks.train.report` and its charts, `trainer_hooks.train.plots` and
`benchmarks.smollm`. Reads metrics.jsonl and starts.jsonl; writes nothing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from rollout.errors import ConfigError
from trainer_hooks.metrics.axes import TRAINER_STEP
from trainer_hooks.metrics.figures import of_prompts
from trainer_hooks.metrics.jsonl import read_jsonl
from trainer_hooks.train.svg_charts import Point

METRICS_NAME, STARTS_NAME = "metrics.jsonl", "starts.jsonl"
WARMUP_STEP = "warmup/step"
_LARGEST = 1e300  # a larger value cannot be drawn


@dataclass(frozen=True)
class SeedResults:
    """The results of one seed: its directory, its metric rows, and its starts, the first first.

    A run that was resumed has started several times. An old run, or the run of a program of its
    own, has no record of its starts.
    """

    directory: Path
    rows: Sequence[Mapping[str, Any]]
    starts: Sequence[Mapping[str, Any]] = ()

    @classmethod
    def read(cls, directory: Path) -> SeedResults:
        """Read the results in `directory`, which may be a run in progress."""
        starts = directory / STARTS_NAME
        return cls(
            directory,
            read_jsonl(directory / METRICS_NAME),
            read_jsonl(starts) if starts.exists() else (),
        )

    @property
    def name(self) -> str:
        """Name of the directory, such as seed_0."""
        return self.directory.name

    @property
    def last_start(self) -> Mapping[str, Any]:
        """The record of the latest start; empty without one."""
        return self.starts[-1] if self.starts else {}

    @cached_property
    def steps(self) -> list[Mapping[str, Any]]:
        """Rows of the training steps that have a reward."""
        return [row for row in self.rows if row.get("reward") is not None]

    def values(self, metric: str) -> dict[float, float]:
        """Return the finite values of `metric` by step. A later row of the same step counts."""
        axis = WARMUP_STEP if metric.startswith("warmup/") else TRAINER_STEP
        if metric.startswith("rollouts/"):  # a count that is missing is 0
            return {row.get(axis, 0): row.get(metric) or 0 for row in self.rows if "reward" in row}
        return {
            row.get(axis, 0): row[metric]
            for row in self.rows
            if isinstance(row.get(metric), int | float) and abs(row[metric]) < _LARGEST
        }


@dataclass(frozen=True)
class RunResults:
    """The results of a run, by seed."""

    name: str
    seeds: Sequence[SeedResults]

    @property
    def label(self) -> str:
        """The run's name, and the number of its seeds if it has several."""
        return self.name if len(self.seeds) == 1 else f"{self.name}, {len(self.seeds)} seeds"

    def points(self, metric: str) -> list[Point]:
        """Return the mean of `metric` over the seeds, and its range, by step."""
        by_step: dict[float, list[float]] = defaultdict(list)
        for seed in self.seeds:
            for step, value in seed.values(metric).items():
                by_step[step].append(value)
        return [Point.mean(step, values) for step, values in sorted(by_step.items())]


def read_runs(directories: Sequence[Path]) -> list[RunResults]:
    """Read the runs in `directories`: of a run, with its seeds in seed_*, or of one seed.

    Runs are named after their directories, by as many of the last parts of the paths as tell them
    apart. Raises ConfigError for a directory without metrics.jsonl, and for one given twice.
    """
    paths = [directory.resolve() for directory in directories]
    for path in paths:
        if paths.count(path) > 1:
            raise ConfigError(f"{path} is given twice; give each run once")
    return [
        RunResults(name, [SeedResults.read(own) for own in _seeds(directory, path)])
        for name, directory, path in zip(_names(paths), directories, paths, strict=True)
    ]


def metric_names(runs: Sequence[RunResults]) -> list[str]:
    """Return the names of all metrics that a row of the runs has, in the order of the rows."""
    rows = (row for run in runs for seed in run.seeds for row in seed.rows)
    return list(dict.fromkeys(name for row in rows for name in row))


def prompts_note(runs: Sequence[RunResults], metric: str) -> str:
    """Return text such as " (n=64)" for a metric of held-out prompts, "" for others.

    Returns "" as well if the rows do not say the number, and if it differs between the runs.
    """
    if not metric.startswith("eval/"):
        return ""
    name = f"{metric.rpartition('/')[0]}/num_prompts"
    numbers = {point.low for run in runs for point in run.points(name)}
    return of_prompts(numbers.pop()) if len(numbers) == 1 else ""


def band_note(runs: Sequence[RunResults]) -> str:
    """Return what bands are, for a legend; "" if no run has several seeds."""
    if all(len(run.seeds) == 1 for run in runs):
        return ""
    seeds = f"{len(runs[0].seeds)} seeds" if len(runs) == 1 else "seeds"
    return f"mean of {seeds}; band: lowest to highest"


def _seeds(directory: Path, path: Path) -> list[Path]:
    if (path / METRICS_NAME).exists():
        return [path]
    numbers = {
        int(each.name.removeprefix("seed_")): each
        for each in path.glob("seed_*")
        if each.name.removeprefix("seed_").isdecimal() and (each / METRICS_NAME).exists()
    }
    if not numbers:
        raise ConfigError(
            f"{directory} holds no {METRICS_NAME}, nor seed_* directories with one; name the "
            "directory of a run, such as outputs/train/demo, or of one of its seeds"
        )
    return [numbers[number] for number in sorted(numbers)]


def _names(paths: Sequence[Path]) -> list[str]:
    """Return the shortest ends of the paths that differ. A seed is named with its run."""
    num_parts = 1
    while True:
        names = [
            "/".join(path.parts[-num_parts - path.name.startswith("seed_") :]) for path in paths
        ]
        if len(set(names)) == len(names):
            return names
        num_parts += 1
