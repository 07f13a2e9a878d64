"""Weights & Biases as a sink of metrics, if the package is installed.

Used by `trainer_hooks.metrics.logger`, `trainer_hooks.train.run_files` and users' training loops.
wandb writes files under the run's directory and, online, to its server.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from rollout.errors import ConfigError
from trainer_hooks.metrics.axes import AXIS_OF_METRIC, ROLLOUT_VERSION, TRAINER_STEP
from trainer_hooks.metrics.histogram import NUM_BINS, read_histograms

WandbMode = Literal["online", "offline", "disabled"]
_MAX_NAME_LENGTH = 128


def start_wandb_run(
    *,
    project: str,
    name: str,
    directory: Path,
    config: Mapping[str, Any],
    mode: WandbMode = "offline",
    resume: bool = False,
    group: str | None = None,
    tags: Sequence[str] = (),
) -> Any:
    """Start a wandb run with declared step axes, for MetricsLogger, and return it.

    `name`: name of the run, which is cut to wandb's limit.
    `group`: name shared by the runs of a sweep.
    `directory`: where wandb writes its files.
    `config`: settings of the run, which W&B shows.
    `mode`: "offline" needs no account and no network. `wandb sync` uploads the run later.
    `resume`: True continues the run that a killed process left in `directory`.
    Raises ConfigError if wandb is not installed.
    """
    try:
        import wandb
    except ImportError as error:
        raise ConfigError(
            "logging to wandb needs the package: pip install wandb (extra 'wandb'), or leave "
            "wandb out of the logger"
        ) from error
    directory.mkdir(parents=True, exist_ok=True)
    run = wandb.init(
        project=project,
        name=name[:_MAX_NAME_LENGTH],
        group=group,
        tags=list(tags),
        dir=str(directory),
        config=dict(config),
        mode=mode,
        resume="auto" if resume else None,
        settings=wandb.Settings(silent=True),
    )
    declare_axes(run)
    return run


def declare_axes(run: Any) -> None:
    """Declare the axis of each metric to `run`, an object with wandb's `define_metric`."""
    for axis in (TRAINER_STEP, ROLLOUT_VERSION):
        run.define_metric(axis)
    for glob, axis in AXIS_OF_METRIC.items():
        run.define_metric(glob, step_metric=axis)


def as_table(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> Any:
    """Return a `wandb.Table`, which a wandb run accepts as the value of a metric."""
    import wandb

    return wandb.Table(columns=list(columns), data=[list(row) for row in rows])


def where_to_look(run: Any) -> str:
    """Return a text with the run's address, or with the upload command of an offline run."""
    if run.offline:  # reading the address of an offline run warns
        return f"W&B, offline: wandb sync {Path(run.dir).parent}"
    return f"W&B: {run.url}"


def with_histograms(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of `row` with each histogram also as a `wandb.Histogram`, named `<name>/hist`.

    The columns of the histogram stay. Nothing is added if wandb is not installed.
    """
    histograms = read_histograms(row)
    if not histograms:
        return dict(row)
    try:
        import wandb
    except ImportError:
        return dict(row)
    drawn = {}
    for name, counts in histograms.items():
        bins = range(min(max(counts), NUM_BINS) + 1)
        values = np.array([counts.get(i, 0) for i in bins])
        edges = np.array([*bins, bins.stop]) - 0.5
        drawn[f"{name}/hist"] = wandb.Histogram(np_histogram=(values, edges))
    return {**row, **drawn}
