"""What the policy wrote, for people: samples with their rewards, advantages and versions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, Protocol

import torch
from rich.console import Group, RenderableType
from rich.text import Text

from trainer_hooks.jobs.settings import LoggerSettings
from trainer_hooks.metrics import JsonlWriter
from trainer_hooks.metrics.axes import TRAINER_STEP
from trainer_hooks.metrics.logger import MetricsLogger
from trainer_hooks.producer import TrainingBatch

FILE_NAME = "completions.jsonl"
TABLE_COLUMNS = (
    TRAINER_STEP, "prompt", "completion", "reward", "rewards", "advantage", "versions", "mean_lag",
    "finish_reason",
)  # fmt: skip
_SHOWN_CHARACTERS = 320

Sample = Mapping[str, Any]


class ShowsSamples(Protocol):
    """Shows samples to a person, as a Dashboard does."""

    def show_samples(self, samples: Sequence[Sample]) -> None:
        """Show these instead of those before."""
        ...


class SampleLog:
    """Writes samples of every step to completions.jsonl, and every `sample_interval` steps some of
    them to a view and, as a table, to W&B. A context manager.

    `tokenizer`: one of transformers. `resume_step`: as for a MetricsLogger.
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
        self._file = JsonlWriter(
            directory / FILE_NAME, resume_step, max_bytes=settings.completions_file_bytes
        )

    def log(self, step: int, batch: TrainingBatch, advantages_B: torch.Tensor) -> None:
        """Record samples of the `batch` that was trained on in `step`, with their advantages."""
        settings = self._settings
        rows = range(min(len(batch.rollouts), settings.num_completions))
        written = {i: sample_of(step, batch, i, advantages_B, self._tokenizer) for i in rows}
        for sample in written.values():
            self._file.log(sample)
        if step != 1 and step % settings.sample_interval:
            return
        chosen = [
            written.get(i) or sample_of(step, batch, i, advantages_B, self._tokenizer)
            for i in chosen_rows(batch.rollouts.rewards_B, batch.group_size, settings.num_samples)
        ]
        if chosen:
            self._view.show_samples(chosen)
            table = [[_cell(sample, name) for name in TABLE_COLUMNS] for sample in chosen]
            self._logger.log_table("completions", TABLE_COLUMNS, table)

    def __enter__(self) -> SampleLog:
        return self

    def __exit__(self, *exception: object) -> None:
        self._file.close()


def sample_of(
    step: int, batch: TrainingBatch, row: int, advantages_B: torch.Tensor, tokenizer: Any
) -> dict[str, Any]:
    """Rollout `row` of the batch as a row of completions.jsonl.

    `spans`: the text after the prompt in runs of tokens of one version; the version of what no
    version sampled, such as tool output, is None. Lags are versions that the sampling weights are
    behind those that the step trained.
    """
    rollouts = batch.rollouts
    group, sample = divmod(row, batch.group_size)
    scored, start = batch.groups[group], int(rollouts.prompt_lengths_B[row])
    end = int(rollouts.lengths_B[row])
    tokens_T = rollouts.tokens_BT[row, :end].tolist()
    lags = rollouts.policy_lag_BT[row, :end].tolist()
    mask = rollouts.mask_BT[row, :end].tolist()
    versions = [
        rollouts.train_version - lag if trained else None
        for lag, trained in zip(lags, mask, strict=True)
    ]
    own_lags = [lag for lag, trained in zip(lags, mask, strict=True) if trained]
    reward = scored.rewards[sample]
    return {
        TRAINER_STEP: step,
        "group": group,
        "sample": sample,
        "prompt_index": scored.ticket.index,
        "data_source": scored.item.columns.get("data_source"),
        "prompt": tokenizer.decode(tokens_T[:start], skip_special_tokens=False),
        "completion": tokenizer.decode(tokens_T[start:], skip_special_tokens=False),
        "spans": [
            [version, tokenizer.decode([tokens_T[i] for i in run], skip_special_tokens=False)]
            for version, run in groupby(range(start, end), key=versions.__getitem__)
        ],
        "reward": float(reward),
        "rewards": dict(getattr(reward, "terms", {})),
        "advantage": float(advantages_B[row]),
        "num_tokens": int(rollouts.completion_lengths_B[row]),
        "mean_lag": sum(own_lags) / len(own_lags) if own_lags else None,
        "max_lag": max(own_lags, default=None),
        "train_version": rollouts.train_version,
        "finish_reason": scored.rollouts[sample].requests[-1].finish_reason,
    }


def chosen_rows(rewards_B: torch.Tensor, group_size: int, count: int) -> list[int]:
    """`count` rollouts worth a look, of groups evenly spread: in turn the best of its group, the
    worst, and one between. Failed rollouts are left out.
    """
    rewards_PG = rewards_B.view(-1, group_size)
    num_groups = len(rewards_PG)
    chosen = []
    for i in range(min(count, num_groups)):
        group = i * num_groups // min(count, num_groups)
        order = rewards_PG[group].argsort(descending=True).tolist()
        order = [j for j in order if not rewards_PG[group, j].isnan()]
        if order:
            place = (0, len(order) - 1, len(order) // 2)[i % 3]
            chosen.append(group * group_size + order[place])
    return chosen


def samples_text(samples: Sequence[Sample]) -> RenderableType:
    """The samples for a terminal: figures in one line, then the end of the prompt and the text."""
    parts = []
    for sample in samples:
        head = Text(f"step {sample[TRAINER_STEP]}  reward {sample['reward']:.3f}", style="bold")
        head.append(f"  {terms_text(sample)}" if terms_text(sample) else "", style="not bold")
        head.append(f"  advantage {sample['advantage']:+.3f}", style="not bold")
        head.append(f"  versions {versions_text(sample)}", style="not bold")
        if sample["mean_lag"] is not None:
            head.append(f"  lag {sample['mean_lag']:.2f}", style="not bold")
        parts.append(head)
        parts.append(Text(f"  {_one_line(sample['prompt'], keeps_end=True)}", style="dim"))
        parts.append(Text(f"  > {_one_line(sample['completion'])}"))
    return Group(*parts)


def terms_text(sample: Sample) -> str:
    """The parts of the reward, as "(right 1.000, length -0.250)"; "" for a single one."""
    terms = [f"{name} {value:.3f}" for name, value in sample["rewards"].items()]
    return f"({', '.join(terms)})" if len(terms) > 1 else ""


def versions_text(sample: Sample) -> str:
    """The versions that sampled the text, as "7" or "6-7"; "-" if none did."""
    versions = [version for version, _ in sample["spans"] if version is not None]
    if not versions:
        return "-"
    low, high = min(versions), max(versions)
    return str(low) if low == high else f"{low}-{high}"


def _one_line(text: str, keeps_end: bool = False) -> str:
    line = text.replace("\n", "\u23ce")
    if len(line) <= _SHOWN_CHARACTERS:
        return line
    if keeps_end:
        return "..." + line[-_SHOWN_CHARACTERS:]
    half = _SHOWN_CHARACTERS // 2
    return f"{line[:half]} ... {line[-half:]}"


def _cell(sample: Sample, name: str) -> Any:
    if name == "versions":
        return versions_text(sample)
    if name == "rewards":
        return ", ".join(f"{term}={value:g}" for term, value in sample[name].items())
    return sample[name]
