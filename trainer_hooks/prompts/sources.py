"""Prompt sources: JSONL and parquet files, `datasets` and reasoning-gym, read when needed.

Used by users' training loops, `trainer_hooks.train.task`, `trainer_hooks.train.prompts` and
`trainer_hooks.train.palindromes`, as the `source` of a PromptLedger. Each source is a Sequence of
PromptItem. Sources read files and write none. Errors name a bad row by its file and line, or by its
index.
"""

from __future__ import annotations

import json
import os
from abc import abstractmethod
from array import array
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, overload

import numpy as np

from rollout.errors import ConfigError
from rollout.text import RenderedText
from rollout.utf8_lines import BYTE_ORDER_MARK, decode_line
from trainer_hooks.prompts.chat_format import ChatFormat, as_chat_template
from trainer_hooks.prompts.checks import place_of
from trainer_hooks.prompts.ledger import PromptItem, PromptRows, as_prompt_item, as_rows
from trainer_hooks.prompts.rows import as_item

Paths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]


class _LazyPrompts(Sequence[PromptItem]):
    """A Sequence whose items are read when they are indexed. A slice is a list."""

    @abstractmethod
    def _read(self, index: int) -> PromptItem: ...

    def place_of(self, index: int) -> str:
        """Return the text by which errors name a row, such as "questions.jsonl, line 7"."""
        return f"row {index} of {type(self).__name__}"

    @overload
    def __getitem__(self, index: int) -> PromptItem: ...

    @overload
    def __getitem__(self, index: slice) -> list[PromptItem]: ...

    def __getitem__(self, index: int | slice) -> PromptItem | list[PromptItem]:
        if isinstance(index, slice):
            return [self._read(i) for i in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(f"prompt {index} of {len(self)}")
        return self._read(index % len(self))


class JsonlPrompts(_LazyPrompts):
    """Rows of JSONL files: one JSON object per line, with the prompt in `prompt_column`.

    Empty lines are skipped. Memory holds only the offset and the number of each line, 16 bytes per
    line. A prompt is text or token ids, or messages if there is a `chat_template` (see
    `as_chat_template`). Raises ConfigError for an unreadable file. Reading a row raises ConfigError
    for a line that is not an object with a prompt, and for a file that was changed.
    """

    def __init__(
        self, paths: Paths, prompt_column: str = "prompt", chat_template: Any | None = None
    ) -> None:
        self._files = [_index_lines(path) for path in _as_paths(paths)]
        self._ends = list(accumulate(len(file.offsets) for file in self._files))
        self._prompt_column = prompt_column
        self._template = as_chat_template(chat_template)

    def __len__(self) -> int:
        """Number of prompts in all files."""
        return self._ends[-1]

    def _read(self, index: int) -> PromptItem:
        which, row = _locate(self._ends, index)
        file, place = self._files[which], self.place_of(index)
        with file.path.open("rb") as stream:
            if _stamp(stream.fileno()) != file.stamp:
                raise ConfigError(f"{file.path} was changed while it was in use; open it again")
            stream.seek(file.offsets[row])
            line = stream.readline()
        try:
            text = decode_line(line)
        except ValueError as error:
            raise ConfigError(f"{place} {error}") from error
        try:
            values = json.loads(text)
        except ValueError as error:
            raise ConfigError(f"{place} is not JSON: {error}") from error
        if not isinstance(values, dict):
            raise ConfigError(f"{place} is a {type(values).__name__}; it must be an object")
        return as_item(values, self._prompt_column, self._template, place)

    def place_of(self, index: int) -> str:
        which, row = _locate(self._ends, index)
        return f"{self._files[which].path}, line {self._files[which].line_numbers[row]}"


class ParquetPrompts(_LazyPrompts):
    """Rows of parquet files, such as verl's datasets: the prompt and any other columns.

    The `ground_truth` in verl's column `reward_model` also becomes the column `ground_truth`.
    Memory holds the row group that was read last, so shuffled access is quick if row groups are
    small or all rows are in one group.
    `columns`: columns to read besides the prompt. None reads all columns.
    `chat_template`: as for JsonlPrompts.
    Raises ConfigError if pyarrow is missing, and for an unreadable file or a missing column.
    Reading a row raises ConfigError for a row without a prompt.
    """

    def __init__(
        self,
        paths: Paths,
        prompt_column: str = "prompt",
        columns: Sequence[str] | None = None,
        chat_template: Any | None = None,
    ) -> None:
        self._parquet = _import_parquet()
        self._columns = None if columns is None else [prompt_column, *columns]
        self._groups: list[tuple[Path, int]] = []
        self._first_rows: list[int] = []  # of each group, in its file
        sizes = []
        for path in _as_paths(paths):
            file_sizes = self._row_group_sizes(path, prompt_column)
            self._groups += [(path, group) for group in range(len(file_sizes))]
            self._first_rows += [end - n for end, n in zip(accumulate(file_sizes), file_sizes)]  # noqa: B905
            sizes += file_sizes
        self._ends = list(accumulate(sizes)) or [0]
        self._prompt_column = prompt_column
        self._template = as_chat_template(chat_template)
        self._held: tuple[int, Any] | None = None  # replaced as a whole, so threads may read it

    def __len__(self) -> int:
        """Number of rows in all files."""
        return self._ends[-1]

    def _read(self, index: int) -> PromptItem:
        group, row = _locate(self._ends, index)
        path, group_in_file = self._groups[group]
        held = self._held
        if held is None or held[0] != group:
            with self._parquet.ParquetFile(path) as file:
                held = (group, file.read_row_group(group_in_file, columns=self._columns))
            self._held = held
        place = self.place_of(index)
        try:
            values = held[1].slice(row, 1).to_pylist()[0]
        except UnicodeDecodeError as error:  # files of other programs may hold any bytes
            raise ConfigError(
                f"{place} holds text that is not UTF-8: {error}; write the file again as UTF-8"
            ) from error
        return as_item(values, self._prompt_column, self._template, place, is_arrow=True)

    def place_of(self, index: int) -> str:
        group, row = _locate(self._ends, index)
        return f"{self._groups[group][0]}, row {self._first_rows[group] + row}"

    def _row_group_sizes(self, path: Path, prompt_column: str) -> list[int]:
        try:
            with self._parquet.ParquetFile(path) as file:
                present, metadata = file.schema_arrow.names, file.metadata
                sizes = [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)]
        except (OSError, ValueError) as error:  # pyarrow's own errors are ValueErrors
            raise ConfigError(f"{path} cannot be read as parquet: {error}") from error
        for column in self._columns or [prompt_column]:
            if column not in present:
                raise ConfigError(f"{path} has no column {column!r}; it has {', '.join(present)}")
        return sizes


class DatasetPrompts(_LazyPrompts):
    """Rows of a `datasets.Dataset`, or of a dataset that `save_to_disk` wrote to a directory.

    `split`: name of the split of a DatasetDict. A name is required even if there is only one split.
    `chat_template`: as for JsonlPrompts.
    Prompts and `ground_truth` are as in ParquetPrompts. An IterableDataset is read into memory at
    once, so that its rows can be shuffled and a run can be resumed.
    Raises ConfigError if the package is missing, for a directory without a dataset or split, for a
    missing column, and for an IterableDataset with more than MAX_ITERATED_ROWS rows.
    """

    def __init__(
        self,
        dataset: Any,
        prompt_column: str = "prompt",
        split: str | None = None,
        chat_template: Any | None = None,
    ) -> None:
        self._place = "the dataset"
        if isinstance(dataset, (str, os.PathLike)):
            self._place = str(dataset)
            dataset = _load_dataset(self._place)
        if isinstance(dataset, Mapping):  # a DatasetDict or an IterableDatasetDict
            dataset = _split_of(dataset, split, self._place)
        # An IterableDataset that has not read a row has no names.
        names = dataset.column_names
        if names is not None and prompt_column not in names:
            raise ConfigError(
                f"{self._place} has no column {prompt_column!r}; it has {', '.join(names)}"
            )
        self._rows, self._prompt_column = as_rows(dataset), prompt_column
        self._template = as_chat_template(chat_template)

    def __len__(self) -> int:
        """Number of rows."""
        return len(self._rows)

    def _read(self, index: int) -> PromptItem:
        place = self.place_of(index)
        return as_item(self._rows[index], self._prompt_column, self._template, place, is_arrow=True)

    def place_of(self, index: int) -> str:
        return f"{self._place}, row {index}"


class ReasoningGymPrompts(_LazyPrompts):
    """Rows of a reasoning-gym dataset, with the columns `answer` and `entry`.

    `dataset`: a dataset, or the name of one to create with `size`, `seed` and `settings`.
    `chat_template`: renders the prompts and adds the column `messages`.
    Raises ConfigError if the package is missing or refuses the settings.
    """

    def __init__(
        self,
        dataset: Any,
        size: int = 0,
        seed: int = 0,
        chat_template: ChatFormat | None = None,
        **settings: Any,
    ) -> None:
        if isinstance(dataset, str):
            dataset = _create_reasoning_gym(dataset, {**settings, "size": size, "seed": seed})
        self.dataset, self._template = dataset, chat_template

    def __len__(self) -> int:
        """Number of items."""
        return len(self.dataset)

    def _read(self, index: int) -> PromptItem:
        entry = self.dataset[index]
        columns = {"answer": entry["answer"], "entry": entry}
        if self._template is None:
            return PromptItem(entry["question"], columns)
        messages = self._template.messages(entry["question"])
        return PromptItem(self._template.render(messages), {**columns, "messages": messages})


class FormattedPrompts(_LazyPrompts):
    """Rows of another source, with prompts rendered by a chat template.

    A text is rendered as a user's message. Token ids and text that a template has already rendered
    stay as they are.
    `rows`: rows that `as_prompt_item` accepts.
    """

    def __init__(self, rows: PromptRows, chat_template: ChatFormat) -> None:
        self.rows, self._template = rows, chat_template

    def __len__(self) -> int:
        """Number of rows."""
        return len(self.rows)

    def _read(self, index: int) -> PromptItem:
        item = as_prompt_item(self.rows[index])
        if isinstance(item.prompt, RenderedText) or not isinstance(item.prompt, (str, list)):
            return item
        values = {**item.columns, "prompt": item.prompt}
        return as_item(values, "prompt", self._template, self.place_of(index))

    def place_of(self, index: int) -> str:
        return place_of(self.rows, index)


class MixedPrompts(_LazyPrompts):
    """Rows of several sources, interleaved evenly in proportion to their weights.

    An epoch has every row of every source at least once. Rows of a source that is small for its
    weight repeat. The column `data_source` is the source's name, unless the row has this column.
    `sources`: rows and weight by name.
    Raises ConfigError without sources, for a source without rows, and for weights that are not
    above 0.
    """

    def __init__(self, sources: Mapping[str, tuple[PromptRows, float]]) -> None:
        for name, (rows, weight) in sources.items():
            if not len(rows) or not weight > 0.0:
                raise ConfigError(
                    f"source {name!r} has {len(rows)} rows and weight={weight}; both must be above "
                    "0"
                )
        if not sources:
            raise ConfigError("a mixture needs at least one source")
        self._names = list(sources)
        self._rows = [rows for rows, _ in sources.values()]
        per_weight = max(len(rows) / weight for rows, weight in sources.values())
        counts = [max(round(per_weight * weight), 1) for _, weight in sources.values()]
        # Position of the k-th row of a source among all rows, on a scale from 0 to 1.
        places = np.concatenate([(np.arange(count) + 0.5) / count for count in counts])
        owners = np.repeat(np.arange(len(counts)), counts)
        numbers = np.concatenate([np.arange(count) for count in counts])
        order = np.argsort(places, kind="stable")
        self._owners, self._numbers = owners[order], numbers[order]

    def __len__(self) -> int:
        """Number of prompts in an epoch."""
        return len(self._owners)

    def _read(self, index: int) -> PromptItem:
        which = int(self._owners[index])
        rows = self._rows[which]
        item = as_prompt_item(rows[int(self._numbers[index]) % len(rows)])
        return PromptItem(item.prompt, {"data_source": self._names[which], **item.columns})


@dataclass(frozen=True, slots=True, kw_only=True)
class _IndexedFile:
    path: Path
    stamp: tuple[int, int]  # size and time of change
    offsets: Sequence[int]
    line_numbers: Sequence[int]


def _index_lines(path: Path) -> _IndexedFile:
    offsets, line_numbers = array("Q"), array("Q")
    offset = 0
    try:
        with path.open("rb") as stream:
            stamp = _stamp(stream.fileno())
            for number, line in enumerate(stream, start=1):
                # A byte order mark alone is an empty line.
                if line.removeprefix(BYTE_ORDER_MARK).strip():
                    offsets.append(offset)
                    line_numbers.append(number)
                offset += len(line)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    return _IndexedFile(path=path, stamp=stamp, offsets=offsets, line_numbers=line_numbers)


def _stamp(descriptor: int) -> tuple[int, int]:
    status = os.fstat(descriptor)
    return status.st_size, status.st_mtime_ns


def _as_paths(paths: Paths) -> list[Path]:
    given = [paths] if isinstance(paths, (str, os.PathLike)) else list(paths)
    if not given:
        raise ConfigError("no file is given; prompts need one or more")
    return [Path(path) for path in given]


def _locate(ends: Sequence[int], index: int) -> tuple[int, int]:
    part = bisect_right(ends, index)
    return part, index - (ends[part - 1] if part else 0)


def _import_parquet() -> Any:
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise ConfigError(
            "reading parquet needs pyarrow: pip install pyarrow (extra 'data')"
        ) from error
    return pyarrow.parquet


def _load_dataset(directory: str) -> Any:
    try:
        from datasets import load_from_disk
    except ImportError as error:
        raise ConfigError(f"reading {directory} needs the package: pip install datasets") from error
    try:
        return load_from_disk(directory)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{directory} holds no dataset of save_to_disk: {error}") from error


def _split_of(splits: Mapping[str, Any], split: str | None, place: str) -> Any:
    if split is None or split not in splits:
        raise ConfigError(
            f"{place} holds the splits {', '.join(splits)}; split={split!r} must name one of them"
        )
    return splits[split]


def _create_reasoning_gym(name: str, settings: dict[str, Any]) -> Any:
    try:
        import reasoning_gym
    except ImportError as error:
        raise ConfigError(
            "reasoning-gym prompts need the package: pip install reasoning-gym (extra 'data')"
        ) from error
    try:
        return reasoning_gym.create_dataset(name, **settings)
    except (AssertionError, TypeError, ValueError) as error:
        raise ConfigError(f"reasoning-gym dataset {name!r} with {settings}: {error}") from error
