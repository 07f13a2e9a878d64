"""Checks the rows of a prompt source, so that no bad row stops a job in the middle.

Used by `trainer_hooks.train.task`, `trainer_hooks.train.prompts`, `trainer_hooks.train.settings`
and `trainer_hooks.prompts.sources`. `check_rows` reads every row once before the job begins.
CheckedWhenRead checks each row when it is read. Bad rows are logged.
"""

from __future__ import annotations

import hashlib
import logging
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any, Literal

from rollout.errors import ConfigError
from rollout.utf8_lines import lone_surrogate
from trainer_hooks.prompts.ledger import PromptItem, PromptRows, as_prompt_item, item_of

OnBadRow = Literal["refuse", "skip"]
_NUM_SHOWN = 3  # number of bad rows named in a message
_MAX_REPLACED = 100  # successive bad rows after which CheckedWhenRead raises an error
_CHUNK = 512  # number of rows encoded in one call
logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptCheck:
    """Checks whether an engine can answer the prompt of a row.

    `encode_all`: returns the engine's token ids of each text.
    `vocab_size`: number of token ids of the engine's model. None skips this check.
    `max_sequence_length`: the engine's limit in tokens. None skips this check.
    `answer_column`: column that must hold a text or a number, on which a warm-up trains. None skips
    this check.
    """

    encode_all: Callable[[Sequence[str]], Sequence[Sequence[int]]]
    vocab_size: int | None = None
    max_sequence_length: int | None = None
    answer_column: str | None = None

    def faults(self, items: Sequence[PromptItem]) -> list[str | None]:
        """Return an error text for each row, or None for a good row."""
        faults = [self._fault_of_values(item) for item in items]
        texts = {
            index: item.prompt
            for index, item in enumerate(items)
            if faults[index] is None and isinstance(item.prompt, str)
        }
        encoded = self.encode_all(list(texts.values())) if texts else []
        tokens = dict(zip(texts, encoded, strict=True))
        for index, item in enumerate(items):
            if faults[index] is None:
                ids = tokens[index] if isinstance(item.prompt, str) else item.prompt
                faults[index] = self._fault_of_tokens(ids)
        return faults

    def _fault_of_values(self, item: PromptItem) -> str | None:
        if (text := lone_surrogate([item.prompt, item.columns])) is not None:
            return f"{text[:40]!r} has half a surrogate pair; write the whole character"
        if self.answer_column is None:
            return None
        if self.answer_column not in item.columns:
            return (
                f"the warm-up learns the column {self.answer_column!r}, but the row has "
                f"{', '.join(item.columns) or 'no columns'}; set warmup.answer_column"
            )
        answer = item.columns[self.answer_column]
        if isinstance(answer, bool) or not isinstance(answer, (str, Real)):
            return (
                f"the warm-up learns the column {self.answer_column!r}, which is {answer!r:.60}; "
                "it must be a text or a number"
            )
        return None

    def _fault_of_tokens(self, ids: Sequence[int]) -> str | None:
        if not len(ids):
            return "the prompt is empty: it has no token"
        limit, vocab_size = self.max_sequence_length, self.vocab_size
        if limit is not None and len(ids) >= limit:
            return (
                f"a prompt of {len(ids)} tokens leaves no room to answer in "
                f"engine.max_sequence_length={limit}; shorten it, or raise the limit"
            )
        if vocab_size is not None and not 0 <= min(ids) <= max(ids) < vocab_size:
            return f"token ids must be in [0, {vocab_size}); these are in [{min(ids)}, {max(ids)}]"
        return None


class SelectedRows:
    """Rows of a source selected by `indices`, a sequence or an array, in the order of `indices`."""

    def __init__(self, rows: PromptRows, indices: Any) -> None:
        self._rows, self._indices = rows, indices

    def __len__(self) -> int:
        """Number of rows."""
        return len(self._indices)

    def __getitem__(self, index: int, /) -> PromptItem:
        return as_prompt_item(self._rows[int(self._indices[index])])

    def place_of(self, index: int) -> str:
        """Return the text by which errors name a row. The row's source chooses it."""
        return place_of(self._rows, int(self._indices[index]))


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedRows:
    """The good rows of a source, a hash of each row's prompt, and the number of bad rows."""

    rows: PromptRows
    keys: Sequence[int]
    num_skipped: int


def check_rows(
    rows: PromptRows, check: PromptCheck, on_bad_row: OnBadRow, name: str
) -> CheckedRows:
    """Read every row once and return the good rows.

    `on_bad_row`: "refuse" raises ConfigError for bad rows, "skip" logs them and leaves them out.
    `name`: name of the source in messages.
    Raises ConfigError also if all rows are bad. The error names the first bad rows.
    """
    good, keys = array("Q"), array("Q")
    bad: list[str] = []
    for start in range(0, len(rows), _CHUNK):
        items: list[tuple[int, PromptItem]] = []
        for index in range(start, min(start + _CHUNK, len(rows))):
            try:
                items.append((index, item_of(rows, index)))
            except ConfigError as error:
                bad.append(str(error))
        for (index, item), fault in zip(items, check.faults([i for _, i in items]), strict=True):
            if fault is None:
                good.append(index)
                keys.append(key_of(item))
            else:
                bad.append(f"{place_of(rows, index)}: {fault}")
    if bad:
        _report(bad, len(rows), on_bad_row, name)
    chosen = SelectedRows(rows, good) if bad else rows
    return CheckedRows(rows=chosen, keys=keys, num_skipped=len(bad))


class CheckedWhenRead:
    """Rows that a user's program makes, checked when they are read.

    A bad row is logged and replaced by the next good one.
    """

    def __init__(self, rows: PromptRows, check: PromptCheck) -> None:
        self._rows, self._check = rows, check

    def __len__(self) -> int:
        """Number of rows."""
        return len(self._rows)

    def __getitem__(self, index: int, /) -> PromptItem:
        """Return row `index`, or the next good row. Raises ConfigError if too many rows are bad."""
        if not 0 <= index < len(self):
            raise IndexError(f"prompt {index} of {len(self)}")
        faults = []
        for offset in range(min(_MAX_REPLACED, len(self))):
            place = (index + offset) % len(self)
            try:
                item = item_of(self._rows, place)
                (fault,) = self._check.faults([item])
            except ConfigError as error:
                fault = str(error)
            if fault is None:
                return item
            faults.append(f"row {place} of the prompts: {fault}")
            logger.warning("replaced a bad row by the next one: %s", faults[-1])
        raise ConfigError(f"{len(faults)} successive rows are bad: {faults[0]}")


def _report(bad: Sequence[str], num_rows: int, on_bad_row: OnBadRow, name: str) -> None:
    shown = "; ".join(bad[:_NUM_SHOWN])
    if len(bad) > _NUM_SHOWN:
        shown += f"; and {len(bad) - _NUM_SHOWN} more bad rows"
    if len(bad) == num_rows:
        raise ConfigError(f"{name} has no row to train on, all {num_rows} are bad: {shown}")
    if on_bad_row == "refuse":
        raise ConfigError(f"{shown}. Mend them, or set data.on_bad_row=skip to leave them out")
    logger.warning("%s: %d of %d rows are bad and skipped: %s", name, len(bad), num_rows, shown)


def place_of(rows: PromptRows, index: int) -> str:
    """Return the text by which errors name a row, from `place_of` of `rows` or from its index."""
    own = getattr(rows, "place_of", None)
    return f"row {index} of the prompts" if own is None else str(own(index))


def key_of(item: PromptItem) -> int:
    """Return a 64-bit hash of the prompt, the same in every process."""
    prompt = item.prompt if isinstance(item.prompt, str) else [int(each) for each in item.prompt]
    digest = hashlib.blake2b(repr(prompt).encode("utf-8", "surrogatepass"), digest_size=8)
    return int.from_bytes(digest.digest(), "little")
