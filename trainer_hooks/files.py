"""Atomic replacement of files and directories: after a kill, the old or the new one is there,
whole.

Used by checkpoints, metrics files and run files. `set_aside` renames files that a user may want to
keep.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path


def replace_file(path: Path, write: Callable[[Path], object]) -> None:
    """Replace `path` by the file that `write` writes: beside it, flushed to the disk, then
    renamed.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    staging = path.with_name(f".{path.name}.tmp")
    write(staging)
    _flush_to_disk(staging)
    os.replace(staging, path)


def replace_text(path: Path, text: str) -> None:
    """Make `text` the content of `path`."""
    replace_file(path, lambda staging: staging.write_text(text, encoding="utf-8"))


def replace_directory(staging: Path, target: Path) -> None:
    """Replace the directory `target` by the finished directory `staging`, by renames."""
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
    """Restore `target` if a kill interrupted `replace_directory`, else delete its outdated copy."""
    outdated = _outdated(target)
    if outdated.exists() and not target.exists():
        os.replace(outdated, target)
    shutil.rmtree(outdated, ignore_errors=True)


def set_aside(path: Path) -> Path | None:
    """Rename a file or directory to <path>.previous, or the first free of <path>.previous-2, ...

    Returns its new path; None if there is nothing at `path`.
    """
    if not path.exists():
        return None
    aside = path.with_name(f"{path.name}.previous")
    number = 2
    while aside.exists():
        aside = path.with_name(f"{path.name}.previous-{number}")
        number += 1
    os.rename(path, aside)
    return aside


def _outdated(target: Path) -> Path:
    """Return the path to which `replace_directory` moves the old directory."""
    return target.with_name(f".{target.name}.old")


def _flush_to_disk(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())
