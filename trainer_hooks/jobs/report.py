"""A run as one HTML page: curves, staleness, where the time went, samples coloured by version.

python -m trainer_hooks.jobs.report outputs/train_grpo/demo/seed_0
"""

from __future__ import annotations

import argparse
import html
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rollout.errors import ConfigError
from trainer_hooks.jobs.samples import FILE_NAME, Sample, terms_text, versions_text
from trainer_hooks.jobs.svg_charts import line_chart, stacked_chart
from trainer_hooks.metrics.axes import TRAINER_STEP
from trainer_hooks.metrics.histogram import read_histogram
from trainer_hooks.metrics.jsonl import read_jsonl, rotated_path

REPORT_NAME = "report.html"
NUM_SAMPLES = 24
# Title -> metrics of one chart, in the order of the page; a chart without values is left out.
CURVES = {
    "reward": ("reward", "eval/greedy_reward"),
    "reward within a group, deviation": ("reward_std",),
    "rewards by term": ("rewards/*/mean",),
    "completion length, tokens": ("completions/mean_length", "completions/max_length"),
    "entropy, nats": ("train/entropy",),
    "loss": ("train/loss",),
    "gradient norm": ("train/grad_norm",),
    "KL to the reference, nats": ("train/kl",),
    "share of tokens clipped": ("train/clip_ratio/region_mean",),
    "staleness, versions": ("policy_staleness/mean", "policy_staleness/max"),
    "tokens per second": ("completions/tokens_per_s", "train/tokens_per_s"),
}
_STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; margin: 2rem auto; max-width: 1100px; padding: 0 1rem;
  color: #1b1b1b; background: #fff; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.1rem; margin-top: 2rem; }
.charts { display: grid; grid-template-columns: repeat(auto-fill, minmax(340px, 1fr)); gap: 1rem; }
figure { margin: 0; } figcaption { font-weight: 600; font-size: .9rem; }
svg { width: 100%; height: auto; }
table { border-collapse: collapse; } td, th { padding: .15rem .8rem .15rem 0; text-align: left; }
.sample { border-left: 3px solid #bbb; padding-left: .8rem; margin: 1rem 0; }
.sample pre { white-space: pre-wrap; overflow-wrap: anywhere; margin: .2rem 0; }
.prompt { color: #666; } .head { font-size: .85rem; }
.span { border-radius: 3px; }
"""
# Ages 0, 1, 2, 3 and more of the weights that sampled; the last colour is of text of no version.
_AGE_COLOURS = ("#d7efd7", "#fff1b8", "#ffd8a8", "#ffc2c2")
_NO_VERSION_COLOUR = "#e3e3e3"


def write_report(directory: Path | str, title: str | None = None) -> Path:
    """Write report.html from the metrics.jsonl and completions.jsonl of a run; returns its path.

    Raises ConfigError for a directory without metrics.
    """
    directory = Path(directory)
    if not (directory / "metrics.jsonl").exists():
        raise ConfigError(f"{directory} holds no metrics.jsonl; name the directory of a run")
    rows = read_jsonl(directory / "metrics.jsonl")
    samples = _chosen(_read_samples(directory / FILE_NAME), NUM_SAMPLES)
    path = directory / REPORT_NAME
    path.write_text(report_page(rows, samples, title or str(directory)), encoding="utf-8")
    return path


def report_page(rows: Sequence[Mapping[str, Any]], samples: Sequence[Sample], title: str) -> str:
    """The page. `rows`: of metrics.jsonl. It needs no other file and no network."""
    steps = [row for row in rows if row.get("reward") is not None]
    parts = [
        "<!doctype html><html lang='en'><meta charset='utf-8'>",
        "<meta name='viewport' content='width=device-width'>",
        f"<title>{html.escape(title)}</title><style>{_STYLE}</style>",
        f"<h1>{html.escape(title)}</h1>",
        _summary_table(steps),
        "<h2>Curves</h2><p>Over training steps.</p><div class='charts'>",
        *_curves(rows),
        "</div><h2>Age of the tokens trained on</h2>",
        "<p>Shares of tokens by how many versions older than the trained weights those are that "
        "sampled them.</p><div class='charts'>",
        _figure("tokens by age", stacked_chart(*_lag_shares(steps))),
        "</div><h2>Time of a step</h2><div class='charts'>",
        _figure("share of the step", stacked_chart(*_time_shares(steps))),
        "</div><h2>Samples</h2>",
        _legend(),
        *(_sample(sample) for sample in samples),
        "</html>\n",
    ]
    return "\n".join(parts)


def _summary_table(steps: Sequence[Mapping[str, Any]]) -> str:
    if not steps:
        return "<p>No step was trained.</p>"
    first, last = steps[0], steps[-1]
    seconds = sum(row.get("timing_s/step") or 0.0 for row in steps)
    cells = {
        "steps": str(last.get(TRAINER_STEP)),
        "reward, first and last step": f"{first['reward']:.3f}, {last['reward']:.3f}",
        "hours": f"{seconds / 3600:.2f}",
        "tokens generated": f"{sum(row.get('completions/num_tokens') or 0 for row in steps):,.0f}",
    }
    rows = "".join(f"<tr><th>{name}</th><td>{text}</td></tr>" for name, text in cells.items())
    return f"<table>{rows}</table>"


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
        if series:
            figures.append(_figure(title, line_chart(series)))
    return figures


def _fits(name: str, pattern: str) -> bool:
    start, star, end = pattern.partition("*")
    return name.startswith(start) and name.endswith(end) if star else name == pattern


def _points(rows: Sequence[Mapping[str, Any]], name: str) -> list[tuple[float, float]]:
    return [
        (row.get(TRAINER_STEP, 0), row[name])
        for row in rows
        if isinstance(row.get(name), int | float)
    ]


def _lag_shares(
    steps: Sequence[Mapping[str, Any]],
) -> tuple[list[float], dict[str, list[float]]]:
    counts = [read_histogram(row, "policy_staleness") for row in steps]
    ages = sorted({age for own in counts for age in own})
    totals = [max(sum(own.values()), 1) for own in counts]
    shares = {
        str(age): [own.get(age, 0) / total for own, total in zip(counts, totals, strict=True)]
        for age in ages
    }
    return [row.get(TRAINER_STEP, 0) for row in steps], shares


def _time_shares(
    steps: Sequence[Mapping[str, Any]],
) -> tuple[list[float], dict[str, list[float]]]:
    prefix = "timing_share/"
    names = dict.fromkeys(name for row in steps for name in row if name.startswith(prefix))
    shares = {name.removeprefix(prefix): [row.get(name) or 0.0 for row in steps] for name in names}
    shown = {name: values for name, values in shares.items() if max(values) >= 0.005}
    return [row.get(TRAINER_STEP, 0) for row in steps], shown


def _figure(title: str, chart: str) -> str:
    return f"<figure><figcaption>{html.escape(title)}</figcaption>{chart}</figure>"


# ---- samples


def _read_samples(path: Path) -> list[Sample]:
    parts = [part for part in (rotated_path(path), path) if part.exists()]
    return [sample for part in parts for sample in read_jsonl(part)]


def _chosen(samples: Sequence[Sample], count: int) -> list[Sample]:
    """Samples evenly spread over the run, the last step's among them."""
    if len(samples) <= count:
        return list(samples)
    return [samples[i * (len(samples) - 1) // (count - 1)] for i in range(count)]


def _legend() -> str:
    names = ("those trained", "1 version old", "2 versions", "3 or more", "no version (tools)")
    shown = zip(names, (*_AGE_COLOURS, _NO_VERSION_COLOUR), strict=True)
    boxes = " ".join(f"<span class='span' style='background:{c}'>{n}</span>" for n, c in shown)
    return f"<p>Colours are the age of the weights that sampled a token: {boxes}</p>"


def _sample(sample: Sample) -> str:
    train_version = sample["train_version"]
    spans = "".join(
        f"<span class='span' title='{_version_title(version)}' "
        f"style='background:{_colour(version, train_version)}'>{html.escape(text)}</span>"
        for version, text in sample["spans"]
    )
    advantage = sample["advantage"]
    head = [
        f"step {sample[TRAINER_STEP]}",
        "failed" if sample["reward"] is None else f"<b>reward {sample['reward']:.3f}</b>",
        html.escape(terms_text(sample)),
        "" if advantage is None else f"advantage {advantage:+.3f}",
        f"versions {versions_text(sample)}, trained at {train_version}",
        f"{sample['num_tokens']} tokens, {html.escape(str(sample['finish_reason']))}",
    ]
    return (
        f"<div class='sample'><div class='head'>{' &middot; '.join(filter(None, head))}</div>"
        f"<pre class='prompt'>{html.escape(sample['prompt'])}</pre><pre>{spans}</pre></div>"
    )


def _version_title(version: int | None) -> str:
    return "no version" if version is None else f"version {version}"


def _colour(version: int | None, train_version: int) -> str:
    if version is None:
        return _NO_VERSION_COLOUR
    return _AGE_COLOURS[min(train_version - version, len(_AGE_COLOURS) - 1)]


def main() -> None:
    """Write the report of the run named on the command line."""
    parser = argparse.ArgumentParser(description="the HTML report of a finished run")
    parser.add_argument("directory", type=Path, help="the run's, with metrics.jsonl in it")
    parser.add_argument("--title")
    arguments = parser.parse_args()
    try:
        print(write_report(arguments.directory, arguments.title))
    except ConfigError as error:
        raise SystemExit(f"error: {error}") from error


if __name__ == "__main__":
    main()
