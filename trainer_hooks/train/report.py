"""A run as one HTML page: curves, staleness, time, and samples coloured by version.

`trainer_hooks.train.main` writes the page when a run ends. For a run in progress, people run
python -m trainer_hooks.train.report outputs/train/demo/seed_0
"""

from __future__ import annotations

import argparse
import html
import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, TypeVar

from rollout.errors import ConfigError
from trainer_hooks.metrics.axes import TRAINER_STEP
from trainer_hooks.metrics.figures import (
    held_out_reward,
    of_prompts,
    sampled_reward,
    step_seconds,
    tokens_per_s,
    total_seconds,
    training_steps,
)
from trainer_hooks.metrics.histogram import NUM_BINS, read_histogram
from trainer_hooks.metrics.jsonl import iterate_jsonl, read_jsonl, rotated_path
from trainer_hooks.metrics.stage_clock import minutes
from trainer_hooks.train.samples import (
    FILE_NAME,
    Sample,
    best_worst_or_middle,
    figures_of,
    reward_text,
    terms_text,
    versions_text,
    visible,
)
from trainer_hooks.train.svg_charts import STYLE, Point, legend, line_chart, stacked_chart

T = TypeVar("T")

REPORT_NAME = "report.html"
# Metrics of each chart by its title, in the order of the page. Charts without values are left out.
CURVES = {
    "reward": ("reward", "eval/greedy_reward"),
    "reward within a group, deviation": ("reward_std",),
    "rewards by term": ("rewards/*/mean",),
    "completion length, tokens": ("completions/mean_length", "completions/max_length"),
    "share of completions cut": ("completions/clipped_ratio",),
    "entropy, nats": ("train/entropy",),
    "loss": ("train/loss",),
    "gradient norm": ("train/grad_norm",),
    "KL to the reference, nats": ("train/kl",),
    "share of tokens clipped": ("train/clip_ratio/region_mean",),
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
WARMUP_STEP = "warmup/step"
_TIME_SHARE = "timing_share/"  # prefix of a share of the time account
# Metrics of held-out prompts; those of a source are eval/<source>/<name>.
EVALUATED = ("greedy_reward", "reward", "pass@", "maj@")
_PAGE_STYLE = """
:root { color-scheme: light dark; --page: #fff; --text: #1b1b1b; --quiet: #5c5c5c; --rule: #ccc; }
@media (prefers-color-scheme: dark) {
  :root { --page: #15181c; --text: #e6e6e6; --quiet: #a5a5a5; --rule: #444; } }
body { font: 15px/1.45 system-ui, sans-serif; margin: 2rem auto; max-width: 1280px;
  padding: 0 1rem; color: var(--text); background: var(--page); }
h1 { font-size: 1.4rem; overflow-wrap: anywhere; } h2 { font-size: 1.15rem; margin-top: 2.2rem; }
nav a { margin-right: 1rem; color: inherit; }
.charts { display: grid; gap: 1.4rem 1.2rem;
  grid-template-columns: repeat(auto-fill, minmax(min(340px, 100%), 1fr)); }
figure { margin: 0; min-width: 0; } figcaption { font-weight: 600; font-size: .9rem; }
.legend { font-size: .8rem; }
table { border-collapse: collapse; }
td, th { padding: .15rem .8rem .15rem 0; text-align: left; font-weight: 400; vertical-align: top; }
th { color: var(--quiet); } td { font-variant-numeric: tabular-nums; }
.note { color: var(--quiet); }
"""

STEPS_WITH_SAMPLES, SAMPLES_PER_STEP = 8, 3
_MAX_CHARACTERS = 20_000  # of one text; the middle of a longer text is left out
_SUMMARY_CHARACTERS = 110
_AGES = ("0 versions", "1", "2", "3 or more")
SAMPLE_STYLE = """
:root { --age0: #d7efd7; --age1: #fff1b8; --age2: #ffd8a8; --age3: #ffc9c9; --tool: #e6e6e6; }
@media (prefers-color-scheme: dark) {
  :root { --age0: #1f4a2a; --age1: #57490f; --age2: #6b3d0e; --age3: #6e2626; --tool: #3a3d42; } }
article { border-left: 3px solid var(--rule); padding-left: .8rem; margin: 1rem 0; }
article p { margin: .2rem 0; font-size: .9rem; overflow-wrap: anywhere; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; margin: .3rem 0; max-height: 26em;
  overflow: auto; font-size: 13px; unicode-bidi: plaintext; }
summary { cursor: pointer; overflow-wrap: anywhere; } h3 { font-size: 1rem; display: inline; }
.prompt { color: var(--quiet); font-size: .9rem; }
.age0, .age1, .age2, .age3, .tool { border-radius: 3px; padding: 0 1px; color: var(--text); }
.age0 { background: var(--age0); } .age1 { background: var(--age1); }
.age2 { background: var(--age2); } .age3 { background: var(--age3); }
.tool { background: var(--tool); font-style: italic; border-bottom: 2px dotted currentColor; }
sup { font-size: .7em; margin-right: 2px; user-select: none; }
"""


def write_report(directory: Path | str, title: str | None = None) -> Path:
    """Write report.html from a run's metrics.jsonl and completions.jsonl. Returns its path.

    The run may be in progress, or may have been killed.
    `title`: heading of the page; None takes the directory. Raises ConfigError for a directory
    without metrics.jsonl.
    """
    directory = Path(directory)
    if not (directory / "metrics.jsonl").exists():
        raise ConfigError(f"{directory} holds no metrics.jsonl; name the directory of a run")
    rows = read_jsonl(directory / "metrics.jsonl")
    samples = _samples_of_shown_steps(directory / FILE_NAME)
    path = directory / REPORT_NAME
    path.write_text(report_page(rows, samples, title or str(directory)), encoding="utf-8")
    return path


def _samples_of_shown_steps(path: Path) -> list[Mapping[str, Any]]:
    """Return the samples of the steps that the page shows. All samples may take gigabytes."""
    parts = [part for part in (rotated_path(path), path) if part.exists()]
    steps = {sample[TRAINER_STEP] for part in parts for sample in iterate_jsonl(part)}
    shown = set(spread(sorted(steps), STEPS_WITH_SAMPLES))
    return [s for part in parts for s in iterate_jsonl(part) if s[TRAINER_STEP] in shown]


def report_page(
    rows: Sequence[Mapping[str, Any]], samples: Sequence[Mapping[str, Any]], title: str
) -> str:
    """Return the page as text. `rows`: from metrics.jsonl. `samples`: from completions.jsonl.

    The page needs no other file and no network, and is well-formed XML.
    """
    steps = [row for row in rows if row.get("reward") is not None]
    sections = {
        "Curves": _charts(_curves(rows)),
        "Evaluation": _charts(_evaluations(rows)),
        "Age of tokens and time": _charts(_lags_and_times(steps)),
        "Samples": samples_section(samples),
    }
    present = {name: text for name, text in sections.items() if text}
    links = " ".join(f'<a href="#{_anchor(name)}">{name}</a>' for name in present)
    parts = [
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"/>',
        '<meta name="viewport" content="width=device-width, initial-scale=1"/>',
        f"<title>{html.escape(title)}</title>",
        f"<style>{_PAGE_STYLE}{STYLE}{SAMPLE_STYLE}</style></head><body>",
        f"<h1>{html.escape(title)}</h1>",
        _summary_table(rows, steps),
        f"<nav>{links}</nav>",
        *(f'<h2 id="{_anchor(name)}">{name}</h2>{text}' for name, text in present.items()),
        "</body></html>\n",
    ]
    return "\n".join(parts)


def _anchor(name: str) -> str:
    return name.lower().replace(" ", "-")


def _summary_table(rows: Sequence[Mapping[str, Any]], steps: Sequence[Mapping[str, Any]]) -> str:
    cells = {}
    all_steps = training_steps(rows)
    if (sampled := sampled_reward(all_steps)) is not None:
        tokens = sum(row.get("completions/num_tokens") or 0 for row in all_steps)
        cells = {
            "steps": f"{all_steps[-1].get(TRAINER_STEP, len(all_steps)):,}",
            f"reward, first and last {sampled.num} steps, means": str(sampled),
            "time": minutes(total_seconds(all_steps)),
            "tokens generated": f"{tokens:,.0f}",
        }
    if (rate := tokens_per_s(all_steps)) is not None:
        cells["tokens per second"] = f"{rate:,.0f}"
    if (step_s := step_seconds(all_steps)) is not None:
        cells["time of a step, mean of the last ones"] = f"{step_s:,.2f} s"
    if (held_out := held_out_reward(rows)) is not None:
        cells[f"held-out reward, greedy{of_prompts(held_out.num)}"] = str(held_out)
    shares = {
        "tokens older than the weights they train": "policy_staleness/stale_fraction",
        "rollouts that failed": "failed_fraction",
        "engines idle": "engine/idle_share",
    }
    for label, name in shares.items():
        if values := [row[name] for row in steps if row.get(name) is not None]:
            cells[label] = f"{fmean(values):.1%}"
    text = "" if steps else '<p class="note">No training step is in the metrics.</p>'
    lines = "".join(f"<tr><th>{name}</th><td>{value}</td></tr>" for name, value in cells.items())
    return text + (f"<table>{lines}</table>" if lines else "")


# ---- charts


def _charts(figures: Sequence[str]) -> str:
    return f'<div class="charts">{"".join(figures)}</div>' if figures else ""


def _figure(title: str, names: Sequence[str], chart: str) -> str:
    return f"<figure><figcaption>{html.escape(title)}</figcaption>{chart}{legend(names)}</figure>"


def _curves(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    figures = []
    names = dict.fromkeys(name for row in rows for name in row)
    for title, wanted in CURVES.items():
        series = {
            name: points
            for pattern in wanted
            for name in names
            if _fits(name, pattern) and (points := _points(rows, name))
        }
        if any("*" in pattern for pattern in wanted):
            series = _short_names(series)
        if title == "rewards by term" and len(series) == 1:
            continue  # equals the reward
        if series:
            figures.append(_figure(title, list(series), line_chart(series)))
    return figures


def _short_names(series: Mapping[str, list[Point]]) -> dict[str, list[Point]]:
    """Return the series under short names, without counts that are always 0."""
    short = {}
    for name, points in series.items():
        prefix, _, own = name.partition("/")
        if prefix == "rewards":
            short[own.removesuffix("/mean")] = points
        elif any(count for _, count in points):
            own = own.rpartition("/")[2].removeprefix("num_").removesuffix("_groups")
            short[own.replace("_", " ")] = points
    return short


def _evaluations(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a chart per evaluation metric, with a line per source."""
    charts: dict[str, dict[str, list[Point]]] = defaultdict(dict)
    for name in dict.fromkeys(name for row in rows for name in row if name.startswith("eval/")):
        source, _, metric = name.removeprefix("eval/").rpartition("/")
        if metric.startswith(EVALUATED) and (points := _points(rows, name)):
            charts[metric][source or "all"] = points
    return [
        _figure(f"held out: {metric}", list(series), line_chart(series))
        for metric, series in charts.items()
        if metric != "greedy_reward" or len(series) > 1  # else it is in the chart of the reward
    ]


def _fits(name: str, pattern: str) -> bool:
    start, star, end = pattern.partition("*")
    if not star:
        return name == pattern
    is_long = len(name) > len(start) + len(end)
    return is_long and name.startswith(start) and name.endswith(end)


def _points(rows: Sequence[Mapping[str, Any]], name: str) -> list[Point]:
    axis = WARMUP_STEP if name.startswith("warmup/") else TRAINER_STEP
    if name.startswith("rollouts/"):  # a count that is missing is 0
        return [(row.get(axis, 0), row.get(name) or 0) for row in rows if "reward" in row]
    return [
        (row.get(axis, 0), row[name])
        for row in rows
        if isinstance(row.get(name), int | float) and abs(row[name]) < 1e300
    ]


def _lags_and_times(steps: Sequence[Mapping[str, Any]]) -> list[str]:
    if not steps:
        return []
    xs = [row.get(TRAINER_STEP, 0) for row in steps]
    parts = {
        "tokens trained on, by age in versions": _lag_shares(steps),
        "time of a step, shares": _time_shares(steps),
    }
    return [_figure(name, list(own), stacked_chart(xs, own)) for name, own in parts.items() if own]


def _lag_shares(steps: Sequence[Mapping[str, Any]]) -> dict[str, list[float]]:
    counts = [read_histogram(row, "policy_staleness") for row in steps]
    totals = [max(sum(own.values()), 1) for own in counts]
    return {
        f"{age}+" if age == NUM_BINS else str(age): [
            own.get(age, 0) / total for own, total in zip(counts, totals, strict=True)
        ]
        for age in sorted({age for own in counts for age in own})
    }


def _time_shares(steps: Sequence[Mapping[str, Any]]) -> dict[str, list[float]]:
    """Return the shares of each step's time by category, the category with the largest sum first.

    Categories that are always below 1% are left out.
    """
    names = dict.fromkeys(name for row in steps for name in row if name.startswith(_TIME_SHARE))
    shares = {
        name.removeprefix(_TIME_SHARE): [row.get(name) or 0.0 for row in steps] for name in names
    }
    ordered = sorted(shares, key=lambda name: -sum(shares[name]))
    return {name: shares[name] for name in ordered if max(shares[name]) >= 0.01}


# ---- samples


def samples_section(samples: Sequence[Sample]) -> str:
    """Return the HTML of samples from STEPS_WITH_SAMPLES steps spread over the run.

    The last step is unfolded. Returns "" without samples.
    """
    by_step: dict[int, list[Sample]] = defaultdict(list)
    for sample in samples:
        by_step[sample[TRAINER_STEP]].append(sample)
    steps = spread(sorted(by_step), STEPS_WITH_SAMPLES)
    if not steps:
        return ""
    parts = [_age_legend()]
    for step in reversed(steps):
        is_open = ' open="open"' if step == steps[-1] else ""
        shown = "".join(map(_article, chosen_samples(by_step[step], SAMPLES_PER_STEP)))
        summary = f"<summary><h3>step {step:,}</h3></summary>"
        parts.append(f"<details{is_open}>{summary}{shown}</details>")
    return "\n".join(parts)


def chosen_samples(samples: Sequence[Sample], count: int) -> list[Sample]:
    """Return samples of a step, one of each of `count` evenly spread groups.

    They are in turn the best, the worst and the middle one of their group. A failed sample counts
    as the worst of its group.
    """
    groups: dict[int, list[Sample]] = defaultdict(list)
    for sample in samples:
        groups[sample["group"]].append(sample)
    chosen = []
    for i, group in enumerate(spread(list(groups), count)):
        order = sorted(groups[group], key=_reward, reverse=True)
        chosen.append(best_worst_or_middle(order, i))
    return chosen


def _reward(sample: Sample) -> float:
    return float("-inf") if sample["reward"] is None else float(sample["reward"])


def spread(items: Sequence[T], count: int) -> list[T]:
    """Return `count` (2 or more) of `items`, evenly spread from the first to the last, or all."""
    if len(items) <= count:
        return list(items)
    return [items[i * (len(items) - 1) // (count - 1)] for i in range(count)]


def _age_legend() -> str:
    boxes = " ".join(f'<span class="age{i}">{name}</span>' for i, name in enumerate(_AGES))
    return (
        '<p class="note">Each step shows the best of one group, the worst of another, one between. '
        f"Colours show how many versions older the sampling weights are than the trained: {boxes} "
        '<span class="tool">not trained on: text of tools, users or failed rollouts</span></p>'
    )


def _article(sample: Sample) -> str:
    source, state = sample.get("data_source"), sample.get("state")
    versions = f"{versions_text(sample)}, trained at {sample['train_version']}"
    figures = [
        "" if source is None else html.escape(str(source)),
        f"<b>{html.escape(reward_text(sample))}</b>",
        html.escape(terms_text(sample)) if len(sample["rewards"]) > 1 else "",
        *map(html.escape, figures_of(sample, versions)),
    ]
    parts = [f"<p>{' · '.join(filter(None, figures))}</p>", _prompt(sample["prompt"])]
    text = f'<pre tabindex="0" aria-label="completion">{_spans(sample)}</pre>'
    if state:
        shown = f"<pre>{_text(json.dumps(state, indent=1, ensure_ascii=False))}</pre>"
        text += f'<details class="prompt"><summary>state</summary>{shown}</details>'
    return f"<article>{''.join(parts)}{text}</article>"


def _prompt(prompt: str) -> str:
    text = prompt.strip()
    if len(text) <= _SUMMARY_CHARACTERS and "\n" not in text:
        return f'<p class="prompt">{_text(text)}</p>'
    end = "… " + " ".join(text[-_SUMMARY_CHARACTERS:].split())
    shown = _text(_cut(text, _MAX_CHARACTERS))
    return f'<details class="prompt"><summary>{_text(end)}</summary><pre>{shown}</pre></details>'


def _spans(sample: Sample) -> str:
    """Return the completion's HTML: a span per run of a version, labelled if there are several."""
    train_version, spans = sample["train_version"], sample["spans"]
    names_versions = len({version for version, _ in spans}) > 1
    limit = max(_MAX_CHARACTERS // max(len(spans), 1), 200)
    parts = []
    for version, text in spans:
        if version is None:
            kind, name = "tool", ""
        else:
            age = min(max(train_version - version, 0), len(_AGES) - 1)
            kind, name = f"age{age}", f"<sup>v{version}</sup>" if names_versions else ""
        parts.append(f'<span class="{kind}">{name}{_text(_cut(text, limit))}</span>')
    return "".join(parts)


def _cut(text: str, length: int) -> str:
    if len(text) <= length:
        return text
    half, left_out = length // 2, len(text) - length
    return f"{text[:half]}\n… {left_out:,} characters left out …\n{text[-half:]}"


def _text(text: str) -> str:
    return html.escape(visible(text))


def main() -> None:
    """Write the report of the run named on the command line."""
    parser = argparse.ArgumentParser(description="the HTML report of a run")
    parser.add_argument("directory", type=Path, help="the run's directory, with metrics.jsonl")
    parser.add_argument("--title")
    arguments = parser.parse_args()
    try:
        print(write_report(arguments.directory, arguments.title))
    except ConfigError as error:
        raise SystemExit(f"error: {error}") from error


if __name__ == "__main__":
    main()
