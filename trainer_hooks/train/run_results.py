"""RunResults: the metrics that the seeds of a run have written, for reports and figures.

Used by `trainer_hooks.train` (report, report_charts, plots, main, run_files), `benchmarks.smollm`
and scripts/run_pictures.py. It reads metrics.jsonl and starts.jsonl, also of unfinished runs.
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
_LARGEST = 1e300  # larger values cannot be drawn


@dataclass(frozen=True)
class SeedResults:
    """The results of one seed: its directory, its rows of metrics, and the records of its starts.
    Each resume adds a start. `starts` is empty if the run wrote no records."""

    directory: Path
    rows: Sequence[Mapping[str, Any]]
    starts: Sequence[Mapping[str, Any]] = ()

    @classmethod
    def read(cls, directory: Path) -> SeedResults:
        """Read the results in `directory`, also of an unfinished run."""
        starts = directory / STARTS_NAME
        return cls(
            directory,
            read_jsonl(directory / METRICS_NAME),
            read_jsonl(starts) if starts.exists() else (),
        )

    @property
    def name(self) -> str:
        return self.directory.name

    @property
    def last_start(self) -> Mapping[str, Any]:
        """Return the record of the latest start, or {} if there is none."""
        return self.starts[-1] if self.starts else {}

    @cached_property
    def steps(self) -> list[Mapping[str, Any]]:
        """Return the rows of the training steps that have a reward."""
        return [row for row in self.rows if row.get("reward") is not None]

    def values(self, metric: str) -> dict[float, float]:
        """Return the finite values of `metric` by step. The last row of a step counts."""
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
        """Return the run's name, and the number of its seeds if it has several."""
        return self.name if len(self.seeds) == 1 else f"{self.name}, {len(self.seeds)} seeds"

    def points(self, metric: str) -> list[Point]:
        """Return the mean of `metric` over the seeds, and its range, by step."""
        by_step: dict[float, list[float]] = defaultdict(list)
        for seed in self.seeds:
            for step, value in seed.values(metric).items():
                by_step[step].append(value)
        return [Point.mean(step, values) for step, values in sorted(by_step.items())]


def read_runs(directories: Sequence[Path]) -> list[RunResults]:
    """Read the runs in `directories`.

    Each directory has a run, with its seeds in seed_*, or one seed. The names of the runs are the
    shortest ends of their paths that differ. Raises ConfigError for a directory without
    metrics.jsonl, and for a directory given twice.
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
    """Return the names of all metrics in the runs' rows, in the order in which they occur."""
    rows = (row for run in runs for seed in run.seeds for row in seed.rows)
    return list(dict.fromkeys(name for row in rows for name in row))


def prompts_note(runs: Sequence[RunResults], metric: str) -> str:
    """Return text such as " (n=64)" for a metric of held-out prompts. Return "" for other metrics,
    and if the number is unknown or differs."""
    if not metric.startswith("eval/"):
        return ""
    name = f"{metric.rpartition('/')[0]}/num_prompts"
    numbers = {point.low for run in runs for point in run.points(name)}
    return of_prompts(numbers.pop()) if len(numbers) == 1 else ""


def band_note(runs: Sequence[RunResults]) -> str:
    """Return an explanation of the bands for a legend, or "" if no run has several seeds."""
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
    """Return the shortest ends of the paths that differ. The name of a seed contains its run."""
    num_parts = 1
    while True:
        names = [
            "/".join(path.parts[-num_parts - path.name.startswith("seed_") :]) for path in paths
        ]
        if len(set(names)) == len(names):
            return names
        num_parts += 1
