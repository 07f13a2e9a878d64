"""The samples of a report: completions coloured by the age of the weights that sampled them."""

from __future__ import annotations

import html
import json
from collections import defaultdict
from collections.abc import Sequence
from typing import TypeVar

from trainer_hooks.metrics.axes import TRAINER_STEP
from trainer_hooks.train.sample_text import (
    Sample,
    best_worst_or_middle,
    reward_text,
    terms_text,
    versions_text,
    visible,
)

T = TypeVar("T")

NUM_STEPS, SAMPLES_PER_STEP = 8, 3
_MAX_CHARACTERS = 20_000  # of one text; the middle of a longer one is left out
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


def samples_section(samples: Sequence[Sample]) -> str:
    """Samples of steps that are spread over the run; the last step is open. "" without any."""
    by_step: dict[int, list[Sample]] = defaultdict(list)
    for sample in samples:
        by_step[sample[TRAINER_STEP]].append(sample)
    steps = spread(sorted(by_step), NUM_STEPS)
    if not steps:
        return ""
    parts = [_legend()]
    for step in reversed(steps):
        is_open = ' open="open"' if step == steps[-1] else ""
        shown = "".join(map(_article, chosen_samples(by_step[step], SAMPLES_PER_STEP)))
        summary = f"<summary><h3>step {step:,}</h3></summary>"
        parts.append(f"<details{is_open}>{summary}{shown}</details>")
    return "\n".join(parts)


def chosen_samples(samples: Sequence[Sample], count: int) -> list[Sample]:
    """`count` samples of a step, of groups evenly spread: in turn the best of its group, the worst,
    and one between. A failed one is the worst.
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
    """`count` of the items, evenly spread, the first and the last among them."""
    if len(items) <= count:
        return list(items)
    return [items[i * (len(items) - 1) // (count - 1)] for i in range(count)]


def _legend() -> str:
    boxes = " ".join(f'<span class="age{i}">{name}</span>' for i, name in enumerate(_AGES))
    return (
        '<p class="note">In each step the best of one group, the worst of another and one between. '
        f"The colour is how much older than the trained weights those are that sampled: {boxes} "
        '<span class="tool">not trained on: of tools, users, a failed rollout</span></p>'
    )


def _article(sample: Sample) -> str:
    advantage, lag = sample["advantage"], sample["mean_lag"]
    source, state = sample.get("data_source"), sample.get("state")
    figures = [
        "" if source is None else html.escape(str(source)),
        f"<b>{html.escape(reward_text(sample))}</b>",
        html.escape(terms_text(sample)) if len(sample["rewards"]) > 1 else "",
        "" if advantage is None else f"advantage {advantage:+.3f}",
        f"versions {versions_text(sample)}, trained at {sample['train_version']}",
        "" if lag is None else f"lag {lag:.2f}",
        f"{sample['num_tokens']:,} tokens, {html.escape(str(sample['finish_reason']))}",
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
    """The completion, a span for each run of a version, which is named where there are several."""
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
