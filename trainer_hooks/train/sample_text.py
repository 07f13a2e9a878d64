"""Rows of completions.jsonl as text for people."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any, TypeVar

from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.text import Text

from trainer_hooks.metrics.axes import TRAINER_STEP

Sample = Mapping[str, Any]
T = TypeVar("T")

MIN_LINES = 2  # of a sample on a terminal: its figures, and one line of its text
_SHOWN_CHARACTERS = 320  # where there is no terminal
_INDENT = 2
_TOOL_STYLE = "italic magenta"
# Control characters would move the cursor of a terminal, and an HTML page may not have them.
_VISIBLE = {code: 0x2400 + code for code in range(0x20) if chr(code) not in "\n\t"}
_VISIBLE |= {0x7F: 0x2421} | dict.fromkeys([*range(0x80, 0xA0), *range(0xD800, 0xE000)], 0xFFFD)


def best_worst_or_middle(ordered: Sequence[T], turn: int) -> T:
    """Of items ordered from the best: in turn the first, the last, and the one in the middle."""
    return ordered[(0, len(ordered) - 1, len(ordered) // 2)[turn % 3]]


def visible(text: str) -> str:
    """`text` with a picture in place of each control character but line ends and tabs."""
    return text.translate(_VISIBLE)


def reward_text(sample: Sample) -> str:
    """As "reward 1.000", or "failed: step_timeout"."""
    if sample["reward"] is not None and isfinite(sample["reward"]):
        return f"reward {sample['reward']:.3f}"
    return f"failed: {sample['failure']}" if sample.get("failure") else "failed"


def terms_text(sample: Sample) -> str:
    """The parts of the reward, as "right 1.000, length -0.250"."""
    return ", ".join(
        f"{name} -" if value is None else f"{name} {value:.3f}"
        for name, value in sample["rewards"].items()
    )


def versions_text(sample: Sample) -> str:
    """The versions that sampled the text, as "7" or "6-7"; "-" if none did."""
    versions = [version for version, _ in sample["spans"] if version is not None]
    if not versions:
        return "-"
    low, high = min(versions), max(versions)
    return str(low) if low == high else f"{low}-{high}"


def samples_text(samples: Sequence[Sample]) -> RenderableType:
    """The samples where there is no terminal: figures, the end of the prompt, and the text."""
    parts = []
    for sample in samples:
        prompt, completion = _line(sample["prompt"]), _completion(sample)
        parts += [
            _figures(sample),
            Text("  ").append(_cut_start(prompt, _SHOWN_CHARACTERS), style="dim"),
            Text("  > ").append_text(_cut_middle(completion, _SHOWN_CHARACTERS)),
        ]
    return Group(*parts)


@dataclass(frozen=True, slots=True)
class FittedSamples:
    """As many of the samples as `num_lines` lines hold, for a terminal.

    Each gets a line of figures, one of the end of its prompt if there are three or more, and the
    rest for its text, of which the middle is left out. Text that no version sampled, such as the
    output of tools, has a style of its own.
    """

    samples: Sequence[Sample]
    num_lines: int

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        num_shown = min(len(self.samples), self.num_lines // MIN_LINES)
        width, num_left = options.max_width - _INDENT, self.num_lines
        for i, sample in enumerate(self.samples[:num_shown]):
            num_own = num_left // (num_shown - i)
            lines = [_figures(sample)]
            if num_own > MIN_LINES:
                prompt = _cut_start(_line(sample["prompt"]), width)
                lines.append(Text(" " * _INDENT).append(prompt, style="dim"))
            wrapped = _completion(sample).wrap(console, width, overflow="fold", tab_size=4)
            for line in _middle_left_out(list(wrapped), num_own - len(lines)):
                lines.append(Text(" " * _INDENT).append_text(line))
            num_left -= len(lines)
            for line in lines:
                line.no_wrap, line.overflow = True, "ellipsis"
                yield line


def figures_of(sample: Sample, versions: str) -> list[str]:
    """Return the advantage, `versions`, the lag and the length, without what the sample lacks."""
    advantage, lag = sample["advantage"], sample["mean_lag"]
    figures = [
        "" if advantage is None else f"advantage {advantage:+.3f}",
        f"versions {versions}",
        "" if lag is None else f"lag {lag:.2f}",
        f"{sample['num_tokens']:,} tokens, {sample['finish_reason']}",
    ]
    return list(filter(None, figures))


def _figures(sample: Sample) -> Text:
    text = Text(f"step {sample[TRAINER_STEP]}  {reward_text(sample)}", style="bold")
    rest = [f"({terms_text(sample)})"] if len(sample["rewards"]) > 1 else []
    rest += figures_of(sample, versions_text(sample))
    return text.append("".join(f"  {part}" for part in rest), style="not bold")


def _line(text: str) -> str:
    return visible(text).replace("\n", "\u23ce").replace("\t", " ")


def _completion(sample: Sample) -> Text:
    text = Text()
    for version, span in sample["spans"]:
        text.append(_line(span), style=_TOOL_STYLE if version is None else "default")
    return text


def _cut_start(text: str, length: int) -> str:
    return text if len(text) <= length else "..." + text[3 - length :]


def _cut_middle(text: Text, length: int) -> Text:
    if len(text) <= length:
        return text
    half = length // 2
    return text[:half].append(" ... ").append_text(text[len(text) - half :])


def _middle_left_out(lines: list[Text], num_shown: int) -> list[Text]:
    if len(lines) <= num_shown:
        return lines
    num_last = num_shown // 2
    first = lines[: num_shown - num_last]
    first[-1] = first[-1].append(" ...")
    return [*first, *lines[len(lines) - num_last :]]
