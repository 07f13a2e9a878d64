"""Figures of runs for papers and pages, drawn by matplotlib, with bands over the seeds.

Used by `trainer_hooks.train.report` (`write_figure`) and `benchmarks.smollm` (`plot_curve`). It
writes PDF, SVG and PNG files. matplotlib is imported only when a figure is drawn.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rollout.errors import ConfigError
from rollout.extras import extra_needed
from rollout.keyword_hints import remedy_of_unknown
from trainer_hooks.files import replace_file
from trainer_hooks.metrics.figures import HELD_OUT_REWARD
from trainer_hooks.train.report_charts import LABELS
from trainer_hooks.train.run_results import RunResults, band_note, metric_names, prompts_note
from trainer_hooks.train.svg_charts import LIGHT_COLOURS, NUM_COLOURS

# PDFs have text instead of Type 3 fonts, which journals refuse. Equal curves give equal files.
_SETTINGS: dict[Any, Any] = {"pdf.fonttype": 42, "svg.hashsalt": "rollout", "font.size": 9}
# None removes dates and the version of matplotlib.
_METADATA: dict[str, dict[str, None]] = {
    ".pdf": {"CreationDate": None, "Producer": None},
    ".svg": {"Date": None, "Creator": None},
    ".png": {"Software": None},
}
_SIZE_INCHES = (4.2, 2.8)
_STYLES = ("-", "--", ":", "-.")
_MAX_MARKERS = 40
DEFAULT_METRICS = ("reward", HELD_OUT_REWARD)


def write_figure(
    runs: Sequence[RunResults],
    path: Path,
    metrics: Sequence[str] | None = None,
    title: str | None = None,
) -> Path:
    """Draw metrics of the runs over their steps in one panel, and return `path`.

    `path`: a .pdf, .svg or .png file, which is replaced.
    `metrics`: names of the metrics. None takes the reward, and for a single run the held-out
        reward, too.

    Raises ConfigError for another kind of file, for a metric that a run lacks, and if matplotlib is
    missing.
    """
    if path.suffix not in _METADATA:
        raise ConfigError(f"{path} is no kind of figure; name a file in {', '.join(_METADATA)}")
    if metrics is None:
        has_held_out = len(runs) == 1 and runs[0].points(DEFAULT_METRICS[1])
        metrics = DEFAULT_METRICS if has_held_out else DEFAULT_METRICS[:1]
    for run in runs:
        for metric in metrics:
            if not run.points(metric):
                known = (name for name in metric_names(runs) if run.points(name))
                otherwise = "metrics.jsonl has the names"
                remedy = remedy_of_unknown(metric, known, otherwise, cutoff=0.5)
                raise ConfigError(f"{run.name} has no values of {metric}; {remedy}")
    with extra_needed("figure", f"{path}"):
        import matplotlib
        from matplotlib.figure import Figure
    with matplotlib.rc_context(_SETTINGS):
        figure = Figure(figsize=_SIZE_INCHES, layout="constrained")
        axes: Any = figure.subplots()
        for i, run in enumerate(runs):
            for j, metric in enumerate(metrics):
                names = [run.label] * (len(runs) > 1) + [_label(runs, metric)] * (len(metrics) > 1)
                plot_curve(
                    axes,
                    run,
                    metric,
                    label=", ".join(names) or run.label,
                    color=LIGHT_COLOURS[(i if len(runs) > 1 else j) % NUM_COLOURS],
                    linestyle=_STYLES[j % len(_STYLES)],
                )
        is_reward = set(metrics) <= set(DEFAULT_METRICS)
        words = ["reward"] * is_reward + [_label(runs, metrics[0])] * (len(metrics) == 1)
        axes.set(xlabel="step", ylabel=", ".join(words))
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
        if title is not None:
            figure.suptitle(title)
        if len(axes.lines) > 1 or band_note(runs):  # a legend above the panel hides no curve
            place: dict[str, Any] = {"loc": "outside upper left", "ncols": 2, "frameon": False}
            figure.legend(title=band_note(runs) or None, alignment="left", **place)
        kind: dict[str, Any] = {"format": path.suffix[1:], "metadata": _METADATA[path.suffix]}
        replace_file(path, lambda staging: figure.savefig(staging, dpi=200, **kind))
    return path


def plot_curve(axes: Any, run: RunResults, metric: str, **style: Any) -> None:
    """Draw a run's metric into matplotlib's `axes`: the mean over the seeds, and their range as a
    band. `style` has arguments of `axes.plot`, such as the label."""
    points = run.points(metric)
    xs = [point.x for point in points]
    if len(points) <= _MAX_MARKERS:
        style = {"marker": "o", "markersize": 3, **style}
    (line,) = axes.plot(xs, [point.y for point in points], **style)
    if len(run.seeds) > 1:
        lows, highs = [point.low for point in points], [point.high for point in points]
        axes.fill_between(xs, lows, highs, color=line.get_color(), alpha=0.2, linewidth=0)


def _label(runs: Sequence[RunResults], metric: str) -> str:
    return LABELS.get(metric, metric) + prompts_note(runs, metric)
