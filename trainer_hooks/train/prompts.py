"""Opens the prompt sources that a job's settings name, and holds prompts out for evaluation.

Used by `trainer_hooks.train.task`. It reads files and logs.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from rollout.errors import ConfigError
from trainer_hooks.prompts.chat_format import ChatFormat
from trainer_hooks.prompts.checks import CheckedRows, PromptCheck, SelectedRows, check_rows
from trainer_hooks.prompts.ledger import PromptItem, PromptRows, as_prompt_item, as_rows
from trainer_hooks.prompts.sources import (
    DatasetPrompts,
    FormattedPrompts,
    JsonlPrompts,
    MixedPrompts,
    ParquetPrompts,
    ReasoningGymPrompts,
)
from trainer_hooks.train.config_loading import import_object
from trainer_hooks.train.settings import DataSettings, SourceSettings

logger = logging.getLogger(__name__)


def open_source(
    source: SourceSettings, chat: ChatFormat | None, part: str, seed: int
) -> PromptRows:
    """Return the rows of one source of any kind but "environment".

    `chat`: format of the prompts. None leaves prompts as they are.
    `part`, `seed`: arguments of the function of a source of kind "python".

    Raises ConfigError for missing files, and for several paths if the source takes one.
    """
    path, column, options = source.path, source.prompt_column, dict(source.options)
    assert path is not None, "the settings check it"
    if source.kind in ("jsonl", "parquet"):
        reader = JsonlPrompts if source.kind == "jsonl" else ParquetPrompts
        return reader(path, column, chat_template=chat, **options)
    if not isinstance(path, str):
        raise ConfigError(f"data.path={list(path)} of kind {source.kind} must be one path")
    if source.kind == "datasets":
        return DatasetPrompts(path, column, chat_template=chat, **options)
    if source.kind == "reasoning_gym":
        return ReasoningGymPrompts(path, chat_template=chat, **options)
    rows = as_rows(import_object(path, "data.path")(part, seed, **options))
    return rows if chat is None else FormattedPrompts(rows, chat)


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitPrompts:
    """Prompts for training, and held-out prompts for evaluation.

    `held_out_keys`: hashes (`key_of`) of held-out prompts that were taken out of the sources. Empty
        if the held-out prompts come from `data.held_out_path`.
    """

    train: PromptRows
    held_out: Sequence[PromptItem]
    held_out_keys: frozenset[int]


def split_sources(sources: Mapping[str, CheckedRows], data: DataSettings) -> SplitPrompts:
    """Hold out `data.num_held_out` prompts, by the sources' weights, and mix the other rows.

    At most a tenth of all distinct prompts is held out, and at most a tenth of each source's
    distinct prompts. No training row has a held-out prompt. Raises ConfigError if a source has no
    row left.
    """
    # Sources are split before they are mixed, because a mixture repeats the rows of small sources.
    candidates = _first_rows(sources)
    num_prompts = sum(map(len, candidates.values()))
    num_held_out = min(data.num_held_out, num_prompts // 10)
    weights = np.array([data.named_sources[name].weight for name in sources])
    bounds = np.rint(num_held_out * np.cumsum(weights) / weights.sum()).astype(int)
    chosen: dict[str, list[int]] = {}
    for name, count in zip(sources, np.diff(bounds, prepend=0), strict=True):
        own = candidates[name]
        count = min(int(count), len(own) // 10)
        chosen[name] = [own[i * len(own) // count] for i in range(count)]
    keys = frozenset(sources[n].keys[i] for n, indices in chosen.items() for i in indices)
    train = {name: without_prompts(source, keys, name) for name, source in sources.items()}
    held_out = {n: SelectedRows(sources[n].rows, own) for n, own in chosen.items() if own}
    # With the numbers of rows as weights, the mixture has every row once.
    num_each = {name: float(len(rows)) for name, rows in held_out.items()}
    own_rows = _mixed(held_out, num_each, data) if held_out else []
    rows = _mixed(train, {name: own.weight for name, own in data.named_sources.items()}, data)
    items = [as_prompt_item(own_rows[i]) for i in range(len(own_rows))]
    num_repeats = sum(len(s.rows) for s in sources.values()) - sum(map(len, train.values()))
    if num_repeats > len(items):
        logger.info(
            "left out %d training rows that repeat held-out prompts",
            num_repeats - len(items),
        )
    return SplitPrompts(train=rows, held_out=items, held_out_keys=keys)


def _mixed(
    rows: Mapping[str, PromptRows], weights: Mapping[str, float], data: DataSettings
) -> PromptRows:
    """Return the mixture of the sources, or the only source if `data.sources` is empty."""
    if not data.sources:
        return next(iter(rows.values()))
    return MixedPrompts({name: (own, weights[name]) for name, own in rows.items()})


def without_prompts(source: CheckedRows, keys: frozenset[int], name: str) -> PromptRows:
    """Return the rows of a source whose prompts have none of these keys. `name` is the source's
    name, for messages. Raises ConfigError if no row is left."""
    if not keys:
        return source.rows
    kept = [index for index, key in enumerate(source.keys) if key not in keys]
    if not kept:
        raise ConfigError(
            f"every prompt of the source {name!r} is held out for evaluation; lower "
            "data.num_held_out, or leave the source out"
        )
    return source.rows if len(kept) == len(source.keys) else SelectedRows(source.rows, kept)


def _first_rows(sources: Mapping[str, CheckedRows]) -> dict[str, list[int]]:
    """Return the first row of each distinct prompt of all sources, as row indices by source."""
    seen: set[int] = set()
    found: dict[str, list[int]] = {}
    for name, source in sources.items():
        found[name] = []
        for index, key in enumerate(source.keys):
            if key not in seen:
                seen.add(key)
                found[name].append(index)
    return found


def held_out_of_file(
    rows: PromptRows, data: DataSettings, check: PromptCheck, train: CheckedRows
) -> list[PromptItem]:
    """Return the first `data.num_held_out` good rows of `data.held_out_path`, or all if it is 0.

    Logs a warning if some are also in `train`. Raises ConfigError if all rows are bad, or for a bad
    row if `data.on_bad_row` is "refuse".
    """
    checked = check_rows(rows, check, data.on_bad_row, "data.held_out_path")
    count = min(data.num_held_out or len(checked.rows), len(checked.rows))
    trained = set(train.keys)
    if num_both := sum(key in trained for key in checked.keys[:count]):
        logger.warning(
            "%d of %d prompts of data.held_out_path=%s are also training prompts",
            num_both, count, data.held_out_path,
        )  # fmt: skip
    return [as_prompt_item(checked.rows[i]) for i in range(count)]
