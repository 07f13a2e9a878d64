"""Replacement of files and directories that a kill cannot leave half written.

Used by `trainer_hooks.checkpoint`, `trainer_hooks.metrics.jsonl`, `trainer_hooks.doctor.command`
and by `plots`, `report` and `run_files` of `trainer_hooks.train`. After a kill a directory can be
absent until `restore_directory` is called.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path


def replace_file(path: Path, write: Callable[[Path], object]) -> None:
    """Replace `path` by the file that `write` writes. Makes missing parent directories.

    `write`: called with a temporary path in the same directory. The file is then flushed to the
    disk and renamed to `path`.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    staging = path.with_name(f".{path.name}.tmp")
    write(staging)
    _flush_to_disk(staging)
    os.replace(staging, path)


def replace_text(path: Path, text: str) -> None:
    """Replace `path` by a file with the content `text`, in UTF-8."""
    replace_file(path, lambda staging: staging.write_text(text, encoding="utf-8"))


def replace_directory(staging: Path, target: Path) -> None:
    """Rename `staging` to `target`, and delete the old `target`."""
    for path in staging.rglob("*"):
        if path.is_file():
            _flush_to_disk(path)
    outdated = _outdated(target)
    restore_directory(target)
    if target.exists():
        os.replace(target, outdated)
    os.replace(staging, target)
    shutil.rmtree(outdated, ignore_errors=True)


def restore_directory(target: Path) -> None:
    """Keep the new `target` after an interrupted `replace_directory`, or restore the old one."""
    outdated = _outdated(target)
    if outdated.exists() and not target.exists():
        os.replace(outdated, target)
    shutil.rmtree(outdated, ignore_errors=True)


def _outdated(target: Path) -> Path:
    return target.with_name(f".{target.name}.old")


def _flush_to_disk(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())
