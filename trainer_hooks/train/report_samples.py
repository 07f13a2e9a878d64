"""The samples of a report, in which each token is coloured by the age of its weights.

Used by `trainer_hooks.train.report`. `trainer_hooks.train.report_charts` uses Lengths. Reads
completions.jsonl.
"""

from __future__ import annotations

import html
import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from trainer_hooks.metrics.axes import TRAINER_STEP
from trainer_hooks.metrics.jsonl import iterate_jsonl, rotated_path
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

T = TypeVar("T")
Lengths = dict[int, list[int]]  # numbers of generated tokens of samples, by step

STEPS_WITH_SAMPLES, SAMPLES_PER_STEP = 8, 3
_MAX_CHARACTERS = 20_000  # the middle of a longer text is left out
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


def sample_lengths(directory: Path) -> Lengths:
    """Return the numbers of generated tokens of a seed's samples by step, without failed
    samples."""
    lengths: Lengths = defaultdict(list)
    for sample in _iterate_samples(directory / FILE_NAME):
        own = lengths[sample[TRAINER_STEP]]
        if sample.get("failure") is None:
            own.append(sample["num_tokens"])
    return lengths


def shown_samples(directory: Path, steps: Iterable[int]) -> list[Sample]:
    """Return the samples of the steps that the page shows."""
    shown = set(spread(sorted(steps), STEPS_WITH_SAMPLES))
    return [s for s in _iterate_samples(directory / FILE_NAME) if s[TRAINER_STEP] in shown]


def _iterate_samples(path: Path) -> Iterator[Sample]:
    for part in (rotated_path(path), path):
        if part.exists():
            yield from iterate_jsonl(part)


def samples_section(samples: Sequence[Sample]) -> str:
    """Return the HTML of samples from up to STEPS_WITH_SAMPLES steps of the run, or "" if there are
    none. The last step is unfolded."""
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
    """Return one sample of each of `count` evenly spread groups of a step. The choice alternates
    between a group's best, worst and middle sample. A failed sample counts as the worst."""
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
    """Return `count` of `items`, evenly spread from the first to the last, or all if there are
    fewer. `count` is at least 2."""
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
        shown = f"<pre>{text_html(json.dumps(state, indent=1, ensure_ascii=False))}</pre>"
        text += f'<details class="prompt"><summary>state</summary>{shown}</details>'
    return f"<article>{''.join(parts)}{text}</article>"


def _prompt(prompt: str) -> str:
    text = prompt.strip()
    if len(text) <= _SUMMARY_CHARACTERS and "\n" not in text:
        return f'<p class="prompt">{text_html(text)}</p>'
    end = "… " + " ".join(text[-_SUMMARY_CHARACTERS:].split())
    shown = text_html(_cut(text, _MAX_CHARACTERS))
    return (
        f'<details class="prompt"><summary>{text_html(end)}</summary><pre>{shown}</pre></details>'
    )


def _spans(sample: Sample) -> str:
    """Return the completion's HTML: a <span> per span, with its version unless all have the
    same."""
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
        parts.append(f'<span class="{kind}">{name}{text_html(_cut(text, limit))}</span>')
    return "".join(parts)


def _cut(text: str, length: int) -> str:
    if len(text) <= length:
        return text
    half, left_out = length // 2, len(text) - length
    return f"{text[:half]}\n… {left_out:,} characters left out …\n{text[-half:]}"


def text_html(text: str) -> str:
    """Return `text` as HTML, with symbols in place of control characters."""
    return html.escape(visible(text))
