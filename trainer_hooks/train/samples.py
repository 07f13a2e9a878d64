"""Logs a batch's samples (text, reward, advantage, versions), and formats them for display.

`trainer_hooks.train.main` uses SampleLog, which writes completions.jsonl and sends some samples to
the dashboard and to W&B. `trainer_hooks.train` (dashboard, report, report_samples, no_signal) uses
the rest.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import isfinite
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.text import Text

from rollout.telemetry import ObserverGuard
from rollout.text import IncrementalDetokenizer
from trainer_hooks.collate import RolloutBatch
from trainer_hooks.metrics import JsonlWriter
from trainer_hooks.metrics.axes import TRAINER_STEP
from trainer_hooks.metrics.logger import MetricsLogger
from trainer_hooks.producer import TrainingBatch
from trainer_hooks.train.settings import LoggerSettings

Sample = Mapping[str, Any]
T = TypeVar("T")

FILE_NAME = "completions.jsonl"
TABLE_COLUMNS = (
    TRAINER_STEP, "data_source", "prompt", "completion", "reward", "rewards", "advantage",
    "versions", "mean_lag", "num_tokens", "finish_reason",
)  # fmt: skip
_NEXT_SEQUENCE = "\n[the next token sequence]\n"
MIN_LINES = 2  # least lines of a sample on a terminal: its figures, and one line of its text
_SHOWN_CHARACTERS = 320  # most characters of a text if the output is no terminal
_INDENT = 2
_TOOL_STYLE = "italic magenta"
# Control characters would move a terminal's cursor, and HTML forbids them.
_VISIBLE = {code: 0x2400 + code for code in range(0x20) if chr(code) not in "\n\t"}
_VISIBLE |= {0x7F: 0x2421} | dict.fromkeys([*range(0x80, 0xA0), *range(0xD800, 0xE000)], 0xFFFD)


class ShowsSamples(Protocol):
    """Shows samples to a person, as Dashboard does."""

    def show_samples(self, samples: Sequence[Sample]) -> None:
        """Show `samples` in place of the previous ones."""
        ...


class SampleLog:
    """Writes samples of every step to completions.jsonl.

    Use it as a context manager. After step 1 and every `sample_interval` steps it also sends some
    samples to `view` and, as a table, to `logger`. An error of the view is logged once. `tokenizer`
    is a transformers tokenizer.
    """

    def __init__(
        self,
        directory: Path,
        tokenizer: Any,
        settings: LoggerSettings,
        view: ShowsSamples,
        logger: MetricsLogger,
        resume_step: int | None = None,
    ) -> None:
        self._tokenizer, self._settings = tokenizer, settings
        self._view, self._logger = view, logger
        self._guard = ObserverGuard("the view of the samples")
        self._file = JsonlWriter(
            directory / FILE_NAME, resume_step, max_bytes=settings.completions_file_bytes
        )

    def log(self, step: int, batch: TrainingBatch, advantages_B: torch.Tensor) -> None:
        """Write samples of the `batch` of `step`. `advantages_B` has the advantage of each row of
        its rollouts."""
        settings = self._settings
        rows = range(min(batch.rollouts.num_rollouts, settings.num_completions))
        written = {i: sample_of(step, batch, i, advantages_B, self._tokenizer) for i in rows}
        for sample in written.values():
            self._file.log(sample)
        if step != 1 and step % settings.sample_interval:
            return
        chosen = [
            written.get(i) or sample_of(step, batch, i, advantages_B, self._tokenizer)
            for i in chosen_rows(batch.rollouts.rewards_R, batch.group_size, settings.num_samples)
        ]
        if chosen:
            self._guard.call(self._view.show_samples, chosen)
            table = [[_cell(sample, name) for name in TABLE_COLUMNS] for sample in chosen]
            self._logger.log_table("completions", TABLE_COLUMNS, table)

    def __enter__(self) -> SampleLog:
        return self

    def __exit__(self, *exception: object) -> None:
        self._file.close()


def sample_of(
    step: int, batch: TrainingBatch, index: int, advantages_B: torch.Tensor, tokenizer: Any
) -> dict[str, Any]:
    """Return rollout `index` of the batch as a row of completions.jsonl.

    `advantages_B` has the advantage of each row of the batch. The result's `spans` are [version,
    text] of the tokens after the prompt. The version is None for tokens that were not sampled, such
    as tool output. Further token sequences of the rollout follow, each with its own prompt. Lags
    count the versions between the sampling and the trained weights.
    """
    rollouts = batch.rollouts
    group, sample = divmod(index, batch.group_size)
    scored = batch.groups[group]
    rollout, reward = scored.rollouts[sample], scored.rewards[sample]
    rows = (rollouts.rollout_index_B == index).nonzero().flatten()
    first, start = int(rows[0]), int(rollouts.prompt_lengths_B[rows[0]])
    prompt, spans = _texts(rollouts, first, start, tokenizer)
    for row in rows[1:].tolist():
        spans += [[None, _NEXT_SEQUENCE], *_texts(rollouts, row, 0, tokenizer)[1]]
    own_lags = rollouts.policy_lag_BT[rows][rollouts.mask_BT[rows]].tolist()
    return {
        TRAINER_STEP: step,
        "group": group,
        "sample": sample,
        "prompt_index": scored.ticket.index,
        "data_source": scored.item.columns.get("data_source"),
        "prompt": prompt,
        "completion": "".join(text for _, text in spans),
        "spans": spans,
        "reward": float(reward),
        "rewards": dict(getattr(reward, "terms", {})),
        "advantage": float(advantages_B[first]),
        "num_tokens": rollout.num_generated_tokens,
        "mean_lag": sum(own_lags) / len(own_lags) if own_lags else None,
        "max_lag": max(own_lags, default=None),
        "train_version": rollouts.train_version,
        "finish_reason": rollout.finish_reason,
        "failure": rollout.failure,
        "state": dict(rollout.state),
    }


def _texts(
    rollouts: RolloutBatch, row: int, start: int, tokenizer: Any
) -> tuple[str, list[list[Any]]]:
    """Return the text before `start`, and [version, text] of each later run of equal versions."""
    end = int(rollouts.lengths_B[row])
    tokens_T = rollouts.tokens_BT[row, :end].tolist()
    versions_T = (rollouts.train_version - rollouts.policy_lag_BT[row, :end]).tolist()
    mask_T = rollouts.mask_BT[row, :end].tolist()
    runs = groupby(range(start, end), key=lambda i: versions_T[i] if mask_T[i] else None)
    lengths = [(version, len(list(run))) for version, run in runs]
    before, *texts = texts_of(tokens_T, [start, *(length for _, length in lengths)], tokenizer)
    return before, [[version, text] for (version, _), text in zip(lengths, texts, strict=True)]


class _Verbatim:
    """Decodes by a transformers tokenizer and keeps special tokens."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.eos_id = self.bos_id = None
        self.vocab_size = 0  # not used for decoding

    def encode(self, text: str) -> list[int]:
        raise NotImplementedError

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False))


def texts_of(tokens_T: Sequence[int], lengths: Sequence[int], tokenizer: Any) -> list[str]:
    """Return the texts of consecutive runs of tokens, whose `lengths` add up to all tokens. A
    character whose bytes are in two runs is in the text of the later run."""
    detokenizer, texts, end = IncrementalDetokenizer(_Verbatim(tokenizer)), [], 0
    for length in lengths:
        texts.append(detokenizer.push(tokens_T[end : end + length]))
        end += length
    texts[-1] += detokenizer.finish()
    return texts


def chosen_rows(rewards_R: torch.Tensor, group_size: int, count: int) -> list[int]:
    """Return the index of one rollout of each of `count` evenly spread groups. The choice
    alternates between a group's best, worst and middle rollout. Failed rollouts do not count."""
    rewards_PG = rewards_R.view(-1, group_size)
    num_groups = len(rewards_PG)
    chosen = []
    for i in range(min(count, num_groups)):
        group = i * num_groups // min(count, num_groups)
        order = rewards_PG[group].argsort(descending=True).tolist()
        order = [j for j in order if not rewards_PG[group, j].isnan()]
        if order:
            chosen.append(group * group_size + best_worst_or_middle(order, i))
    return chosen


def _cell(sample: Sample, name: str) -> Any:
    if name == "versions":
        return versions_text(sample)
    if name == "rewards":
        return terms_text(sample)
    return sample[name]


def best_worst_or_middle(ordered: Sequence[T], turn: int) -> T:
    """Return the first, last or middle of `ordered`, by `turn` modulo 3."""
    return ordered[(0, len(ordered) - 1, len(ordered) // 2)[turn % 3]]


def visible(text: str) -> str:
    """Return `text` with symbols in place of control characters, except line ends and tabs."""
    return text.translate(_VISIBLE)


def reward_text(sample: Sample) -> str:
    """Return the reward, such as "reward 1.000", or the failure, such as "failed: step_timeout"."""
    if sample["reward"] is not None and isfinite(sample["reward"]):
        return f"reward {sample['reward']:.3f}"
    return f"failed: {sample['failure']}" if sample.get("failure") else "failed"


def terms_text(sample: Sample) -> str:
    """Return the terms of the reward, such as "right 1.000, length -0.250"."""
    return ", ".join(
        f"{name} -" if value is None else f"{name} {value:.3f}"
        for name, value in sample["rewards"].items()
    )


def versions_text(sample: Sample) -> str:
    """Return the versions that sampled the text, such as "7" or "6-7", or "-" if there are none."""
    versions = [version for version, _ in sample["spans"] if version is not None]
    if not versions:
        return "-"
    low, high = min(versions), max(versions)
    return str(low) if low == high else f"{low}-{high}"


def samples_text(samples: Sequence[Sample]) -> RenderableType:
    """Return the samples as plain lines: numbers, the end of the prompt, and the text."""
    parts = []
    for sample in samples:
        prompt, completion = one_line(sample["prompt"]), _completion(sample)
        parts += [
            _figures(sample),
            Text("  ").append(cut_start(prompt, _SHOWN_CHARACTERS), style="dim"),
            Text("  > ").append_text(_cut_middle(completion, _SHOWN_CHARACTERS)),
        ]
    return Group(*parts)


@dataclass(frozen=True, slots=True)
class FittedSamples:
    """A rich renderable of as many samples as fit into `num_lines` lines of a terminal.

    A sample gets a line of numbers, a line with the end of its prompt if there is room, and lines
    of its text. The middle of a long text is left out. Tool output has its own style.
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
                prompt = cut_start(one_line(sample["prompt"]), width)
                lines.append(Text(" " * _INDENT).append(prompt, style="dim"))
            wrapped = _completion(sample).wrap(console, width, overflow="fold", tab_size=4)
            for line in _middle_left_out(list(wrapped), num_own - len(lines)):
                lines.append(Text(" " * _INDENT).append_text(line))
            num_left -= len(lines)
            for line in lines:
                line.no_wrap, line.overflow = True, "ellipsis"
                yield line


def figures_of(sample: Sample, versions: str) -> list[str]:
    """Return the advantage, `versions`, the lag and the length as texts, without missing values."""
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


def one_line(text: str) -> str:
    """Return `text` in one line, with symbols for line ends and control characters."""
    return visible(text).replace("\n", "\u23ce").replace("\t", " ")


def _completion(sample: Sample) -> Text:
    text = Text()
    for version, span in sample["spans"]:
        text.append(one_line(span), style=_TOOL_STYLE if version is None else "default")
    return text


def cut_start(text: str, length: int) -> str:
    """Return `text`, or three dots and its end with `length` characters in all if it is longer."""
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
