"""What the policy wrote, for people: samples with their rewards, advantages and versions."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, Protocol

import torch

from rollout.telemetry import ObserverGuard
from rollout.text import IncrementalDetokenizer
from trainer_hooks.collate import RolloutBatch
from trainer_hooks.metrics import JsonlWriter
from trainer_hooks.metrics.axes import TRAINER_STEP
from trainer_hooks.metrics.logger import MetricsLogger
from trainer_hooks.producer import TrainingBatch
from trainer_hooks.train.sample_text import (
    Sample,
    best_worst_or_middle,
    terms_text,
    versions_text,
)
from trainer_hooks.train.settings import LoggerSettings

FILE_NAME = "completions.jsonl"
TABLE_COLUMNS = (
    TRAINER_STEP, "data_source", "prompt", "completion", "reward", "rewards", "advantage",
    "versions", "mean_lag", "num_tokens", "finish_reason",
)  # fmt: skip
_NEXT_SEQUENCE = "\n[the next token sequence]\n"


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
        self._guard = ObserverGuard("the view of the samples")
        self._file = JsonlWriter(
            directory / FILE_NAME, resume_step, max_bytes=settings.completions_file_bytes
        )

    def log(self, step: int, batch: TrainingBatch, advantages_B: torch.Tensor) -> None:
        """Record samples of the `batch` that was trained on in `step`, with their advantages."""
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
    """Rollout `index` of the batch as a row of completions.jsonl; `advantages_B`: one per row.

    `spans`: the text after the prompt in runs of tokens of one version; the version of what no
    version sampled, such as tool output, is None. A further token sequence of the rollout follows
    whole, with its own prompt. Lags are versions that the sampling weights are behind those that
    the step trained.
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
    """The text of the row's tokens before `start`, and [version, text] of the runs of tokens of one
    version from there on.
    """
    end = int(rollouts.lengths_B[row])
    tokens_T = rollouts.tokens_BT[row, :end].tolist()
    versions_T = (rollouts.train_version - rollouts.policy_lag_BT[row, :end]).tolist()
    mask_T = rollouts.mask_BT[row, :end].tolist()
    runs = groupby(range(start, end), key=lambda i: versions_T[i] if mask_T[i] else None)
    lengths = [(version, len(list(run))) for version, run in runs]
    before, *texts = texts_of(tokens_T, [start, *(length for _, length in lengths)], tokenizer)
    return before, [[version, text] for (version, _), text in zip(lengths, texts, strict=True)]


class _Verbatim:
    """A transformers tokenizer that decodes special tokens as well."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.eos_id = self.bos_id = None
        self.vocab_size = 0  # only texts are asked for

    def encode(self, text: str) -> list[int]:
        raise NotImplementedError

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False))


def texts_of(tokens_T: Sequence[int], lengths: Sequence[int], tokenizer: Any) -> list[str]:
    """The texts of consecutive runs of tokens, whose `lengths` sum to that of all.

    Together they are the text of all tokens: a character whose bytes are in two runs is in the
    later one, and the space before a word stays.
    """
    detokenizer, texts, end = IncrementalDetokenizer(_Verbatim(tokenizer)), [], 0
    for length in lengths:
        texts.append(detokenizer.push(tokens_T[end : end + length]))
        end += length
    texts[-1] += detokenizer.finish()
    return texts


def chosen_rows(rewards_R: torch.Tensor, group_size: int, count: int) -> list[int]:
    """`count` rollouts worth a look, of groups evenly spread: in turn the best of its group, the
    worst, and one between. Failed rollouts are left out.
    """
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
