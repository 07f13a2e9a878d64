"""Replacement of files and directories that a kill cannot leave half written.

Used by `trainer_hooks.checkpoint`, `trainer_hooks.metrics.jsonl`, `trainer_hooks.train.run_files`
and `trainer_hooks.doctor.command`. A file is always the old or the new one. A directory may be
absent after a kill, until `restore_directory`.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path


def replace_file(path: Path, write: Callable[[Path], object]) -> None:
    """Replace `path` by the file that `write` writes, and make the parent directories.

    `write` gets a path beside `path`. The file is flushed to the disk and then renamed.
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
    """Replace the directory `target` by `staging`. Renames `target` first, then `staging`."""
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
    """Rename the old `target` back if a kill left no new one, else delete what is left of it."""
    outdated = _outdated(target)
    if outdated.exists() and not target.exists():
        os.replace(outdated, target)
    shutil.rmtree(outdated, ignore_errors=True)


def _outdated(target: Path) -> Path:
    """Return the path to which `replace_directory` renames the old directory."""
    return target.with_name(f".{target.name}.old")


def _flush_to_disk(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())
