"""The charts of a report: curves of one or several runs, and histograms over all their steps.

Used by `trainer_hooks.train.report`. `trainer_hooks.train.plots` uses LABELS. All functions are
pure and return HTML.
"""

from __future__ import annotations

import html
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from trainer_hooks.metrics import figures
from trainer_hooks.metrics.axes import TRAINER_STEP
from trainer_hooks.metrics.histogram import NUM_BINS, read_histogram
from trainer_hooks.train.report_samples import Lengths
from trainer_hooks.train.run_results import (
    RunResults,
    SeedResults,
    band_note,
    metric_names,
    prompts_note,
)
from trainer_hooks.train.svg_charts import (
    MAX_BANDS,
    Point,
    bar_chart,
    legend,
    line_chart,
    stacked_chart,
    steps_text,
)

# The charts in the order of the page: {title: metrics, or patterns of metrics}. A chart without
# values is omitted.
CURVES = {
    "reward": ("reward", figures.HELD_OUT_REWARD),
    "reward within a group, deviation": ("reward_std",),
    "groups whose rewards are all equal, share": ("frac_reward_zero_std",),
    "rewards by term": ("rewards/*/mean",),
    "completion length, tokens": ("completions/mean_length", "completions/max_length"),
    "completions cut, share": ("completions/clipped_ratio",),
    "entropy, nats": ("train/entropy",),
    "KL to the sampling policy, nats": ("train/approx_kl",),
    "KL to the reference, nats": ("train/kl",),
    "loss": ("train/loss",),
    "gradient norm": ("train/grad_norm",),
    "learning rate": ("train/learning_rate",),
    "tokens clipped, share": ("train/clip_ratio/region_mean",),
    "staleness, versions": ("policy_staleness/mean", "policy_staleness/max"),
    "bound on staleness, versions": ("producer/max_staleness_versions",),
    "effective sample size of a batch, share": ("producer/ess",),
    "groups that were dropped or made again": ("rollouts/num_*_groups",),
    "groups that were filtered, by reason": ("rollouts/filtered/*",),
    "rollouts that failed, by fault": ("rollouts/num_failures/*",),
    "tokens per second": ("completions/tokens_per_s", "train/tokens_per_s"),
    "warm-up: reward": ("warmup/reward",),
    "warm-up: loss": ("warmup/loss",),
}
# Labels of metrics that share a chart. The default label is the metric's name.
LABELS = {
    "reward": "sampled",
    figures.HELD_OUT_REWARD: "held out, greedy",
    "completions/mean_length": "mean",
    "completions/max_length": "longest",
    "policy_staleness/mean": "mean",
    "policy_staleness/max": "largest",
    "completions/tokens_per_s": "sampled",
    "train/tokens_per_s": "trained on",
}
_TIME_SHARE = "timing_share/"  # prefix of the metrics of TimeAccount
# Metrics of held-out prompts begin with one of these names after eval/ or eval/<source>/.
EVALUATED = ("greedy_reward", "reward", "pass@", "maj@")
_MAX_LENGTH_BINS = 16


def _figure(title: str, chart: str, names: Iterable[str], note: str = "") -> str:
    caption = f"<figcaption>{html.escape(title)}</figcaption>"
    return f"<figure>{caption}{chart}{legend(list(names), note)}</figure>"


def curve_charts(runs: Sequence[RunResults]) -> list[str]:
    """Return the charts of CURVES that have values, as HTML figures."""
    return _curves(runs, _panels(runs))


def evaluation_charts(runs: Sequence[RunResults]) -> list[str]:
    """Return the charts of metrics of held-out prompts. A single run has a line per source."""
    return _curves(runs, _evaluations(runs))


def share_charts(runs: Sequence[RunResults], lengths: Sequence[Sequence[Lengths]]) -> list[str]:
    """Return the charts of shares of time, staleness and lengths. `lengths` has the sample lengths
    of each seed of each run. Time and staleness of a single seed are drawn over its steps."""
    is_alone = len(runs) == 1 and len(runs[0].seeds) == 1
    times = _charts_over_steps(runs[0].seeds[0]) if is_alone else [_time_chart(runs)]
    return list(filter(None, [*times, _age_chart(runs), _length_chart(runs, lengths)]))


def _panels(runs: Sequence[RunResults]) -> dict[str, dict[str, str]]:
    """Return the charts of CURVES as {title: {label: metric}}."""
    names = metric_names(runs)
    return {
        title: {
            _label(name, pattern) + prompts_note(runs, name): name
            for pattern in patterns
            for name in names
            if _fits(name, pattern)
        }
        for title, patterns in CURVES.items()
    }


def _evaluations(runs: Sequence[RunResults]) -> dict[str, dict[str, str]]:
    """Return the charts of held-out prompts as {title: {source: metric}}."""
    panels: dict[str, dict[str, str]] = defaultdict(dict)
    for name in metric_names(runs):
        source, _, metric = name.removeprefix("eval/").rpartition("/")
        if name.startswith("eval/") and metric.startswith(EVALUATED):
            panels[f"held out: {metric}"][(source or "all") + prompts_note(runs, name)] = name
    if list(panels.get("held out: greedy_reward", {}).values()) == [figures.HELD_OUT_REWARD]:
        del panels["held out: greedy_reward"]  # the chart "reward" has it
    return panels


def _fits(name: str, pattern: str) -> bool:
    start, star, end = pattern.partition("*")
    if not star:
        return name == pattern
    is_long = len(name) > len(start) + len(end)
    return is_long and name.startswith(start) and name.endswith(end)


def _label(name: str, pattern: str) -> str:
    """Return the label of a metric: the part of its name that the pattern does not fix."""
    if "*" not in pattern:
        return LABELS.get(name, name)
    prefix, _, own = name.partition("/")
    if prefix == "rewards":
        return own.removesuffix("/mean")
    own = own.rpartition("/")[2].removeprefix("num_").removesuffix("_groups")
    return own.replace("_", " ")


def _curves(runs: Sequence[RunResults], panels: Mapping[str, Mapping[str, str]]) -> list[str]:
    """Return the line charts of `panels`. A single run has one chart per panel, several runs one
    per metric."""
    drawn = []
    for title, metrics in panels.items():
        by_label = {
            label: lines for label, name in metrics.items() if (lines := _lines(runs, name))
        }
        if title == "rewards by term" and len(by_label) == 1:
            continue  # the only term equals the reward
        if len(runs) > 1:
            for label, lines in by_label.items():
                own = title if len(by_label) == 1 else f"{title}: {label}"
                drawn.append(_line_figure(own, lines, runs))
        elif by_label:
            own_lines = {label: next(iter(lines.values())) for label, lines in by_label.items()}
            drawn.append(_line_figure(title, own_lines, runs))
    return drawn


def _line_figure(
    title: str, lines: Mapping[str, Sequence[Point]], runs: Sequence[RunResults]
) -> str:
    note = band_note(runs)
    if len(lines) > MAX_BANDS:  # no band is drawn
        note = note.partition("; ")[0]
    return _figure(title, line_chart(lines), lines, note)


def _lines(runs: Sequence[RunResults], metric: str) -> dict[str, list[Point]]:
    """Return the points of `metric` by run, or {} if there are none or only counts of 0."""
    lines = {run.label: run.points(metric) for run in runs}
    points = [point for line in lines.values() for point in line]
    is_empty = not any(p.high for p in points) if metric.startswith("rollouts/") else not points
    return {} if is_empty else lines


def _charts_over_steps(seed: SeedResults) -> list[str]:
    """Return the charts of shares over the steps of one seed."""
    if not seed.steps:
        return []
    xs = [row.get(TRAINER_STEP, 0) for row in seed.steps]
    parts = {
        "tokens trained on, by age in versions": _lag_shares(seed.steps),
        "time of a step, shares": _time_shares(seed.steps),
    }
    return [_figure(name, stacked_chart(xs, own), own) for name, own in parts.items() if own]


def _lag_shares(steps: Sequence[Mapping[str, Any]]) -> dict[str, list[float]]:
    counts = [read_histogram(row, "policy_staleness") for row in steps]
    totals = [max(sum(own.values()), 1) for own in counts]
    return {
        _age(age): [own.get(age, 0) / total for own, total in zip(counts, totals, strict=True)]
        for age in sorted({age for own in counts for age in own})
    }


def _age(age: int) -> str:
    return f"{age}+" if age == NUM_BINS else str(age)


def _time_shares(steps: Sequence[Mapping[str, Any]]) -> dict[str, list[float]]:
    """Return the shares of each step's time by category, the largest category first. Categories
    that are always below 1% are omitted."""
    names = dict.fromkeys(name for row in steps for name in row if name.startswith(_TIME_SHARE))
    shares = {
        name.removeprefix(_TIME_SHARE): [row.get(name) or 0.0 for row in steps] for name in names
    }
    ordered = sorted(shares, key=lambda name: -sum(shares[name]))
    return {name: shares[name] for name in ordered if max(shares[name]) >= 0.01}


def _time_chart(runs: Sequence[RunResults]) -> str:
    """Return a chart of the shares of the time of all steps by category, with a bar per run.
    Categories below 1% are omitted."""
    names = [name for name in metric_names(runs) if name.startswith(_TIME_SHARE)]
    seconds = {
        run.label: {
            name: math.fsum(
                (step.get(name) or 0.0) * (step.get(figures.STEP_S) or 0.0)
                for seed in run.seeds
                for step in seed.steps
            )
            for name in names
        }
        for run in runs
    }
    totals = {name: math.fsum(own[name] for own in seconds.values()) for name in names}
    least = 0.01 * math.fsum(totals.values())
    drawn = sorted((n for n in names if totals[n] >= least), key=lambda name: -totals[name])
    bins = {name: (name.removeprefix(_TIME_SHARE),) * 2 for name in drawn}
    return _bars("time of all steps, shares", bins, seconds)


def _age_chart(runs: Sequence[RunResults]) -> str:
    """Return the histogram of the staleness of all trained tokens, with a bar per run."""
    tokens: dict[str, Counter[int]] = {}
    for run in runs:
        own = tokens[run.label] = Counter()
        for step in (step for seed in run.seeds for step in seed.steps):
            own.update(read_histogram(step, "policy_staleness"))
    oldest = max((age for own in tokens.values() for age in own), default=-1)
    bins = {age: (_age(age), f"staleness {_age(age)}") for age in range(oldest + 1)}
    return _bars("staleness of all tokens trained on", bins, tokens)


def _length_chart(runs: Sequence[RunResults], lengths: Sequence[Sequence[Lengths]]) -> str:
    """Return the histogram of the sample lengths of the last steps, with a bar per run. A single
    run also has a bar for its first steps."""
    chosen: dict[str, list[int]] = {}
    for run, seeds in zip(runs, lengths, strict=True):
        steps = sorted({step for own in seeds for step in own})
        num_steps = min(figures.WINDOW_STEPS, len(steps) // 2) or len(steps)
        ends = {run.label: steps[-num_steps:]}
        if len(runs) == 1:
            both = [steps[:num_steps], steps[-num_steps:]] if len(steps) > 1 else [steps]
            ends = {steps_text(end[0], end[-1]): end for end in both if end}
        for name, end in ends.items():
            chosen[name] = [n for own in seeds for step in end for n in own.get(step, ())]
    every = [length for own in chosen.values() for length in own]
    if not every:
        return ""
    round_widths = (m * 10**k for k in range(12) for m in (1, 2, 5))
    width = next(width for width in round_widths if width * _MAX_LENGTH_BINS > max(every))
    bins = {
        i: (f"{i * width:,}", f"{i * width:,} to {(i + 1) * width - 1:,} tokens")
        for i in range(max(every) // width + 1)
    }
    counts = {name: Counter(length // width for length in own) for name, own in chosen.items()}
    which = "samples" if len(runs) == 1 else "the last steps' samples"
    return _bars(f"lengths of {which}, tokens", bins, counts)


def _bars(
    title: str, bins: Mapping[Any, tuple[str, str]], counts: Mapping[str, Mapping[Any, float]]
) -> str:
    """Return a chart of each series' shares of `counts`, or "" if all are 0. `bins` has the label
    and name of each bin, by its key in `counts`."""
    totals = {name: sum(own.values()) for name, own in counts.items()}
    if not bins or not any(totals.values()):
        return ""
    shares = {
        name: [own.get(key, 0) / (totals[name] or 1) for key in bins]
        for name, own in counts.items()
    }
    names = shares if len(shares) > 1 else ()  # a single series needs no legend
    return _figure(title, bar_chart(list(bins.values()), shares), names)
