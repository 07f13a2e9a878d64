"""The HTML page of one or several training runs, and the command `rollout report`.

    rollout report outputs/train/demo/seed_0
    rollout report outputs/train/demo outputs/train/ppo         # compares two runs
    rollout report outputs/train/demo --figure reward.pdf       # only the reward, for a paper

A page has results, commands, curves, staleness, times and samples. `trainer_hooks.train.main`
writes the page of each seed and of all seeds when they end. `rollout report` calls `run`.
scripts/run_pictures.py calls `write_report`.
"""

from __future__ import annotations

import argparse
import html
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, NoReturn
from urllib.parse import quote

from rollout.errors import ConfigError
from trainer_hooks.files import replace_text
from trainer_hooks.metrics import figures
from trainer_hooks.metrics.axes import TRAINER_STEP
from trainer_hooks.metrics.stage_clock import minutes
from trainer_hooks.metrics.step_warnings import WARNINGS, run_warnings
from trainer_hooks.train.plots import write_figure
from trainer_hooks.train.report_charts import curve_charts, evaluation_charts, share_charts
from trainer_hooks.train.report_samples import (
    SAMPLE_STYLE,
    sample_lengths,
    samples_section,
    shown_samples,
    text_html,
)
from trainer_hooks.train.run_files import CONFIG_NAME
from trainer_hooks.train.run_results import RunResults, SeedResults, read_runs
from trainer_hooks.train.samples import Sample
from trainer_hooks.train.svg_charts import SCRIPT, STYLE

REPORT_NAME = "report.html"
_MAX_NAME_LENGTH = 100  # most characters of run names in a file name
_PAGE_STYLE = """
:root { color-scheme: light dark; --page: #fff; --text: #1b1b1b; --quiet: #5c5c5c; --rule: #ccc;
  --warning: #b3261e; --warning-page: #fdecea; }
@media (prefers-color-scheme: dark) {
  :root { --page: #15181c; --text: #e6e6e6; --quiet: #a5a5a5; --rule: #444;
    --warning: #ffb4ab; --warning-page: #3a1714; } }
body { font: 15px/1.45 system-ui, sans-serif; margin: 2rem auto; max-width: 1280px;
  padding: 0 1rem; color: var(--text); background: var(--page); }
h1 { font-size: 1.4rem; overflow-wrap: anywhere; } h2 { font-size: 1.15rem; margin: 2rem 0 .5rem; }
nav { margin-top: 1rem; } nav a { margin-right: 1rem; } a { color: inherit; }
.charts { display: grid; gap: 1.4rem 1.2rem;
  grid-template-columns: repeat(auto-fill, minmax(min(340px, 100%), 1fr)); }
figure { margin: 0; min-width: 0; } figcaption { font-weight: 600; font-size: .9rem; }
.legend { font-size: .8rem; }
.wide { overflow-x: auto; } table { border-collapse: collapse; }
td, th { padding: .15rem .8rem .15rem 0; text-align: left; font-weight: 400; vertical-align: top; }
th { color: var(--quiet); } td { font-variant-numeric: tabular-nums; }
.results td { white-space: nowrap; }
thead th { color: inherit; font-weight: 600; }
code { font-size: .9em; overflow-wrap: anywhere; }
.warnings { color: var(--warning); background: var(--warning-page); margin: 1rem 0;
  border-left: 4px solid var(--warning); padding: .5rem .8rem; list-style: none;
  overflow-wrap: anywhere; }
.note { color: var(--quiet); }
.side-by-side { display: flex; flex-wrap: wrap; gap: 0 3rem; }
.side-by-side section { flex: 1 1 26rem; min-width: 0; }
@media (max-width: 600px) {
  .stacked, .stacked :is(thead, tbody) { display: block; } .results td { white-space: normal; }
  .stacked tr { display: grid; grid-template-columns: repeat(var(--columns), minmax(6.5rem, 1fr)); }
  .stacked :is(th, td) { min-width: 0; overflow-wrap: anywhere; }
  .stacked tr > :first-child { grid-column: 1 / -1; padding-top: .4rem; } }
"""


def write_report(
    *directories: Path | str, output: Path | str | None = None, title: str | None = None
) -> Path:
    """Write the page of the runs in `directories`, and return its path.

    `directories`: each has one run with its seeds in seed_*, or one seed. Runs can be unfinished.
    `output`: the file, which is replaced. The default is report.html in the directory, or
        report-<runs>.html in the working directory for several runs.
    `title`: heading of the page.

    Raises ConfigError for a directory without metrics.jsonl.
    """
    paths = [Path(directory) for directory in directories]
    runs = read_runs(paths)
    path = default_output(paths, runs) if output is None else Path(output)
    replace_text(path, report_page(runs, path.parent, title))
    return path


def default_output(paths: Sequence[Path], runs: Sequence[RunResults]) -> Path:
    """Return the default file of a report of the runs in `paths`."""
    if len(paths) == 1:
        return paths[0] / REPORT_NAME
    names = "-".join(run.name.replace("/", "_") for run in runs)
    return Path(f"report-{names[:_MAX_NAME_LENGTH]}.html")


def report_page(runs: Sequence[RunResults], directory: Path, title: str | None = None) -> str:
    """Return the page as well-formed XML, which needs no other file and no network.

    `directory` is the page's directory, from which it links to files of the runs. One seed has a
    chart for all metrics of a kind, and samples. Several seeds of a run are drawn as a mean with a
    band. Several runs have a chart per metric with a line for each run.
    """
    lengths = [[sample_lengths(seed.directory) for seed in run.seeds] for run in runs]
    is_alone = len(runs) == 1 and len(runs[0].seeds) == 1
    samples: list[Sample] = []
    if is_alone:
        samples = shown_samples(runs[0].seeds[0].directory, lengths[0][0])
    sections = {
        "Curves": _grid(curve_charts(runs)),
        "Evaluation": _grid(evaluation_charts(runs)),
        "Age of tokens, lengths and time": _grid(share_charts(runs, lengths)),
        "Samples": samples_section(samples),
    }
    present = {name: text for name, text in sections.items() if text}
    links = " ".join(f'<a href="#{_anchor(name)}">{name}</a>' for name in present)
    heading = text_html(_title(runs) if title is None else title)
    parts = [
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"/>',
        '<meta name="viewport" content="width=device-width, initial-scale=1"/>',
        f"<title>{heading}</title>",
        f"<style>{_PAGE_STYLE}{STYLE}{SAMPLE_STYLE}</style></head><body>",
        f"<h1>{heading}</h1>",
        _warnings_html(runs),
        f'<div class="{"side-by-side" if is_alone else ""}">',
        f"<section><h2>Results</h2>{_results(runs)}</section>{_what_ran(runs, directory)}</div>",
        f"<nav>{links}</nav>",
        *(f'<h2 id="{_anchor(name)}">{name}</h2>{text}' for name, text in present.items()),
        f"{SCRIPT}</body></html>\n",
    ]
    return "\n".join(parts)


def _grid(charts: Sequence[str]) -> str:
    return f'<div class="charts">{"".join(charts)}</div>' if charts else ""


def _anchor(name: str) -> str:
    return name.lower().replace(" ", "-").replace(",", "")


def _title(runs: Sequence[RunResults]) -> str:
    """Return the heading: the algorithm and data of a single run, or the names of several runs."""
    if len(runs) > 1:
        return " · ".join(run.name for run in runs)
    (run,) = runs
    title = run.seeds[0].last_start.get("title")
    if title is None or len(run.seeds) > 1:
        return run.label if title is None else f"{title}, {len(run.seeds)} seeds"
    return f"{title}, {run.seeds[0].name.replace('_', ' ')}"


# ---- warnings, results, and what ran


def _warnings_html(runs: Sequence[RunResults]) -> str:
    found = [
        (f"{run.name}, {seed.name}: " if len(_columns(runs)) > 1 else "") + text
        for run in runs
        for seed in run.seeds
        for text in warnings_of(seed.rows)
    ]
    items = "".join(f"<li>{text_html(text)}</li>" for text in found)
    return f'<ul class="warnings">{items}</ul>' if items else ""


def warnings_of(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return how often a run had each kind of warning, and the texts of the last step that had
    warnings."""
    last: Mapping[str, str] = next((w for row in reversed(rows) if (w := row.get(WARNINGS))), {})
    return [*run_warnings(rows), *last.values()]


@dataclass(frozen=True, slots=True)
class _Column:
    """A column of a table: its heading, and the seeds whose mean it shows."""

    name: str
    seeds: Sequence[SeedResults]


def _columns(runs: Sequence[RunResults]) -> list[_Column]:
    """Return a column per run. A single run has a column per seed, after a column of all seeds."""
    if len(runs) > 1:
        return [_Column(run.label, run.seeds) for run in runs]
    seeds = runs[0].seeds
    every = [_Column(f"mean of {len(seeds)} seeds (range)", seeds)] if len(seeds) > 1 else []
    return [*every, *(_Column(seed.name.replace("_", " "), [seed]) for seed in seeds)]


def _table(rows: Mapping[str, Sequence[str]], columns: Sequence[_Column], kind: str) -> str:
    """Return an HTML table. `rows` has the cells of each row by its label. Empty rows are
    omitted."""
    head = ""
    if len(columns) > 1:
        names = "".join(f"<th>{text_html(column.name)}</th>" for column in columns)
        head = f"<thead><tr><td></td>{names}</tr></thead>"
    lines = "".join(
        f"<tr><th>{label}</th>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>"
        for label, cells in rows.items()
        if any(cells)
    )
    if not lines:
        return ""
    size = f'class="{kind}" style="--columns: {len(columns)}"'
    return f'<div class="wide"><table {size}>{head}<tbody>{lines}</tbody></table></div>'


def _results(runs: Sequence[RunResults]) -> str:
    columns = _columns(runs)
    if not any(seed.steps for run in runs for seed in run.seeds):
        return '<p class="note">No training step is in the metrics.</p>'
    found = [[_numbers(seed) for seed in column.seeds] for column in columns]
    labels = dict.fromkeys(label for seeds in found for own in seeds for label in own)
    rows = {
        label: [_mean_text([own.get(label) for own in seeds]) for seeds in found]
        for label in labels
    }
    return _table(rows, columns, "results stacked" if len(columns) > 1 else "results")


@dataclass(frozen=True, slots=True)
class _Numbers:
    """Numbers of one seed that a table cell shows together. `shown` formats each number."""

    values: Sequence[float]
    shown: Callable[[float], str]
    note: str = ""


def _numbers(seed: SeedResults) -> dict[str, _Numbers]:
    steps, found = figures.training_steps(seed.rows), {}
    reward, held_out = figures.sampled_reward(steps), figures.held_out_reward(seed.rows)
    if held_out is not None:
        note = figures.of_prompts(held_out.num)
        found["held-out reward, greedy"] = _change(held_out, note)
    if reward is not None:
        note = "" if reward.num is None else f" ({reward.num} step{'s' * (reward.num > 1)} each)"
        found["sampled reward, first and last steps"] = _change(reward, note)
    found["steps"] = _Numbers([len(steps)], "{:,.0f}".format)
    found["time of all steps"] = _Numbers([figures.total_seconds(steps)], minutes)
    if (step_s := figures.step_seconds(steps)) is not None:
        found["time of a step, last steps"] = _Numbers([step_s], "{:,.2f} s".format)
    num_tokens = sum(row.get(figures.NUM_TOKENS) or 0 for row in steps)
    found["tokens generated"] = _Numbers([num_tokens], "{:,.0f}".format)
    if (rate := figures.tokens_per_s(steps)) is not None:
        found["tokens per second"] = _Numbers([rate], "{:,.0f}".format)
    shares = {
        "tokens older than the weights they train": "policy_staleness/stale_fraction",
        "rollouts that failed": "failed_fraction",
        "engines idle": "engine/idle_share",
    }
    for label, name in shares.items():
        if values := [row[name] for row in steps if row.get(name) is not None]:
            found[label] = _Numbers([fmean(values)], "{:.1%}".format)
    return found


def _change(change: figures.RewardChange, note: str) -> _Numbers:
    values = [change.before] if change.after is None else [change.before, change.after]
    return _Numbers(values, "{:.3f}".format, note)


def _mean_text(seeds: Sequence[_Numbers | None]) -> str:
    """Return the means over the seeds that have the numbers, with the range if they differ."""
    given = [figure for figure in seeds if figure is not None]
    num_values = max((len(figure.values) for figure in given), default=0)
    given = [figure for figure in given if len(figure.values) == num_values]
    if not given:
        return "-" if seeds else ""
    texts, show = [], given[0].shown
    for values in zip(*(figure.values for figure in given), strict=True):
        low, mean, high = show(min(values)), show(fmean(values)), show(max(values))
        texts.append(mean if low == high else f"{mean} ({low} to {high})")
    return " → ".join(texts) + given[0].note


def _what_ran(runs: Sequence[RunResults], directory: Path) -> str:
    columns = [_Column(run.label, run.seeds) for run in runs]
    cells = [_about(run, directory) for run in runs]
    rows = {label: [own[label] for own in cells] for label in cells[0]}
    table = _table(rows, columns, "stacked")
    return f"<section><h2>What ran</h2>{table}</section>" if table else ""


def _about(run: RunResults, directory: Path) -> dict[str, str]:
    start = run.seeds[0].last_start
    versions = ", ".join(f"{name} {number}" for name, number in start.get("versions", {}).items())
    num_ranks = start.get("num_ranks", 1)
    began = start.get("time", "").replace("T", " ")
    if (num_starts := len(run.seeds[0].starts)) > 1:
        step = start[TRAINER_STEP]
        began += f", start {num_starts}, from step {step:,}"
    return {
        "algorithm, data": text_html(start.get("title", "")),
        "model": text_html(start.get("model", "")),
        "command": _code(start.get("command", "")),
        "overrides": "<br/>".join(map(_code, start.get("overrides", []))),
        "ranks of torchrun": f"{num_ranks:,}" if num_ranks > 1 else "",
        "versions": text_html(versions),
        "commit": _code(start.get("commit") or ""),
        "started": text_html(began),
        "Weights &amp; Biases": "<br/>".join(
            _web_link(wandb) for seed in run.seeds if (wandb := seed.last_start.get("wandb"))
        ),
        "settings": _links(run, CONFIG_NAME, directory),
        "report of each seed": _links(run, REPORT_NAME, directory) if len(run.seeds) > 1 else "",
    }


def _links(run: RunResults, name: str, directory: Path) -> str:
    links = []
    for seed in run.seeds:
        if (path := seed.directory / name).exists():
            url = quote(os.path.relpath(path, directory))
            label = name if len(run.seeds) == 1 else seed.name.replace("_", " ")
            links.append(f'<a href="{html.escape(url)}">{text_html(label)}</a>')
    return ", ".join(links)


def _web_link(text: str) -> str:
    """Return a text such as "W&B: https://..." as a link to its address."""
    _, is_address, rest = text.partition("https://")
    if not is_address:
        return _code(text.removeprefix("W&B, offline: "))
    url = html.escape(f"https://{rest}")
    return f'<a href="{url}">{url}</a>'


def _code(text: str) -> str:
    return f"<code>{text_html(text)}</code>" if text else ""


# ---- the command


class _Parser(argparse.ArgumentParser):
    """A parser that raises ConfigError, which `rollout` prints as one line."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; see {self.prog} --help")


def run(words: Sequence[str]) -> int:
    """Run `rollout report WORDS`: write a page or a figure and print its path. Return 0."""
    parser = _Parser(
        prog="rollout report",
        description="Draw the results of runs of rollout train: one HTML page, or a figure.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "runs", nargs="+", type=Path, metavar="RUN",
        help="directory of a run, such as outputs/train/demo, or of one of its seeds; several are "
        "drawn over each other",
    )  # fmt: skip
    parser.add_argument(
        "--output", type=Path, metavar="FILE",
        help="the page (default: RUN/report.html, or report-RUN-RUN.html here for several)",
    )  # fmt: skip
    parser.add_argument("--title", help="heading of the page or the figure")
    parser.add_argument(
        "--figure", type=Path, metavar="FILE",
        help="write one chart to a .pdf, .svg or .png instead of a page; needs matplotlib",
    )  # fmt: skip
    parser.add_argument(
        "--metric", action="append", metavar="NAME",
        help="a column of metrics.jsonl to draw in the figure; may be repeated (default: reward, "
        "and for a single run eval/greedy_reward)",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    given = parser.parse_intermixed_args(words)
    if given.figure is None:
        if given.metric:
            raise ConfigError(
                f"--metric {given.metric[0]} chooses what --figure FILE draws; give it"
            )
        path = write_report(*given.runs, output=given.output, title=given.title)
    else:
        if given.output is not None:
            raise ConfigError(f"--output {given.output} with --figure; give one of them")
        path = write_figure(read_runs(given.runs), given.figure, given.metric, given.title)
    print(json.dumps({"path": str(path)}) if given.json else path)
    return 0
