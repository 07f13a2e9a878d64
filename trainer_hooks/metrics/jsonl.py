"""JsonlWriter: writes metrics as one JSON object per line, readable while the run continues.

Used by `trainer_hooks.metrics.logger` and by `main`, `run_files` and `samples` of
`trainer_hooks.train`. `trainer_hooks.train.main`, `trainer_hooks.train.run_results`,
`trainer_hooks.train.report_samples` and users read the files.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rollout.set_aside import set_aside
from trainer_hooks.files import replace_text
from trainer_hooks.metrics.axes import TRAINER_STEP


class JsonlWriter:
    """Appends rows to a file and flushes each.

    `resume_step`: None starts a new file and renames an existing one. A number keeps the existing
    rows up to that step and deletes later ones, since a resumed run repeats the steps after its
    checkpoint.
    `max_bytes`: limit on the file. A larger name.jsonl replaces name.1.jsonl, and a new name.jsonl
    is begun. None means no limit.
    """

    def __init__(
        self, path: Path | str, resume_step: int | None = None, max_bytes: int | None = None
    ) -> None:
        self._path, self._max_bytes = Path(path), max_bytes
        for part in (self._path, rotated_path(self._path)):
            if resume_step is None:
                set_aside(part)
            rows = read_jsonl(part) if resume_step is not None and part.exists() else []
            kept = [row for row in rows if row.get(TRAINER_STEP, 0) <= resume_step]
            if part == self._path or part.exists():
                replace_text(part, "".join(_line(row) for row in kept))
        self._file = self._path.open("a", encoding="utf-8")

    def log(self, metrics: Mapping[str, Any]) -> None:
        """Append one row. NaN and infinity become null, and values that JSON lacks become text."""
        self._file.write(_line(metrics))
        self._file.flush()
        if self._max_bytes is not None and self._file.tell() > self._max_bytes:
            self._file.close()
            os.replace(self._path, rotated_path(self._path))
            self._file = self._path.open("a", encoding="utf-8")

    def close(self) -> None:
        """Close the file. A second call has no effect."""
        self._file.close()


def rotated_path(path: Path) -> Path:
    """Return the path of the older rows of `path`, such as name.1.jsonl."""
    return path.with_suffix(f".1{path.suffix}")


def read_jsonl(path: Path | str) -> list[dict[str, Any]]:
    """Return the rows of a file. A last line without a line break, as after a kill, is left out."""
    return list(iterate_jsonl(path))


def iterate_jsonl(path: Path | str) -> Iterator[dict[str, Any]]:
    """Yield the rows of `read_jsonl` one at a time."""
    with Path(path).open(encoding="utf-8", newline="\n") as file:
        for line in file:
            if line.endswith("\n"):
                yield json.loads(line)


def _line(metrics: Mapping[str, Any]) -> str:
    return json.dumps(finite(metrics), default=str) + "\n"


def finite(value: Any) -> Any:
    """Return `value` with None in place of NaN and infinity, which JSON lacks."""
    if isinstance(value, Mapping):
        return {name: finite(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
