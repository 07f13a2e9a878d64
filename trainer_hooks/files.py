"""Atomic replacement of files: after a kill there is the old one or the new one, whole."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path


def replace_file(path: Path, write: Callable[[Path], object]) -> None:
    """Make `path` what `write` writes: beside it, flushed to the disk, then renamed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    staging = path.with_name(f".{path.name}.tmp")
    write(staging)
    _flush_to_disk(staging)
    os.replace(staging, path)


def replace_text(path: Path, text: str) -> None:
    """Make `text` the content of `path`."""
    replace_file(path, lambda staging: staging.write_text(text, encoding="utf-8"))


def replace_directory(staging: Path, target: Path) -> None:
    """Rename the finished directory `staging` to `target`, in place of what was there."""
    for path in staging.rglob("*"):
        if path.is_file():
            _flush_to_disk(path)
    outdated = target.with_name(f".{target.name}.old")
    shutil.rmtree(outdated, ignore_errors=True)
    if target.exists():
        os.replace(target, outdated)
    os.replace(staging, target)
    shutil.rmtree(outdated, ignore_errors=True)


def _flush_to_disk(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())
