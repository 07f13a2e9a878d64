"""Weights & Biases as a sink of metrics, if the package is installed.

Used by MetricsLogger and the training job.
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
    """Return a wandb run with declared step axes, for MetricsLogger.

    `offline` needs no account and no network; `wandb sync` uploads the run later. `resume`
    continues the run that a killed process left in `directory`. `group`: name shared by the runs of
    a sweep. A `name` is cut to wandb's limit. Raises ConfigError if wandb is not installed.
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
    """Declare to `run` (anything with wandb's `define_metric`) the axis of each metric."""
    for axis in (TRAINER_STEP, ROLLOUT_VERSION):
        run.define_metric(axis)
    for glob, axis in AXIS_OF_METRIC.items():
        run.define_metric(glob, step_metric=axis)


def as_table(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> Any:
    """Return a `wandb.Table`, which a run accepts as the value of a metric."""
    import wandb

    return wandb.Table(columns=list(columns), data=[list(row) for row in rows])


def where_to_look(run: Any) -> str:
    """Return where to see the run: its address, or for an offline run the upload command."""
    if run.offline:  # reading the address of an offline run warns
        return f"W&B, offline: wandb sync {Path(run.dir).parent}"
    return f"W&B: {run.url}"


def with_histograms(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return `row` with a `wandb.Histogram` `<name>/hist` for its columns `<name>/hist/<bin>`.

    The columns stay, for comparing and reading back. Without wandb, returns `row` unchanged.
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
