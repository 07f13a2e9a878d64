"""Metrics as one JSON object per line: always written, readable while the run goes on."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from trainer_hooks.files import replace_text, set_aside
from trainer_hooks.metrics.axes import TRAINER_STEP


class JsonlWriter:
    """Appends rows to a file, each flushed at once.

    `resume_step`: None starts the file anew, and renames one that is there (`set_aside`); a step
    keeps the rows up to it, so that a resumed run, which repeats the steps after its checkpoint,
    leaves one row for each. `max_bytes`: a file that gets larger is renamed, name.jsonl to
    name.1.jsonl, which is replaced; None for no limit.
    """

    def __init__(
        self, path: Path | str, resume_step: int | None = None, max_bytes: int | None = None
    ) -> None:
        self._path, self._max_bytes = Path(path), max_bytes
        for part in (self._path, rotated_path(self._path)):
            if resume_step is None and part.exists() and part.stat().st_size:
                set_aside(part)
            rows = read_jsonl(part) if resume_step is not None and part.exists() else []
            kept = [row for row in rows if row.get(TRAINER_STEP, 0) <= resume_step]
            if part == self._path or part.exists():
                replace_text(part, "".join(_line(row) for row in kept))
        self._file = self._path.open("a", encoding="utf-8")

    def log(self, metrics: Mapping[str, Any]) -> None:
        """Append one row; a number that is not finite becomes null, what JSON lacks its text."""
        self._file.write(_line(metrics))
        self._file.flush()
        if self._max_bytes is not None and self._file.tell() > self._max_bytes:
            self._file.close()
            os.replace(self._path, rotated_path(self._path))
            self._file = self._path.open("a", encoding="utf-8")

    def close(self) -> None:
        """Close the file; twice is fine."""
        self._file.close()


def rotated_path(path: Path) -> Path:
    """Where the rows before those of `path` are, once it has got too large."""
    return path.with_suffix(f".1{path.suffix}")


def read_jsonl(path: Path | str) -> list[dict[str, Any]]:
    """The rows of a file; a last line torn by a kill is left out."""
    return list(iterate_jsonl(path))


def iterate_jsonl(path: Path | str) -> Iterator[dict[str, Any]]:
    """As `read_jsonl`, one row at a time."""
    with Path(path).open(encoding="utf-8", newline="\n") as file:
        for line in file:
            if line.endswith("\n"):
                yield json.loads(line)


def _line(metrics: Mapping[str, Any]) -> str:
    return json.dumps(_finite(metrics), default=str) + "\n"


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _finite(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
