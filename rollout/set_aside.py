"""set_aside: renames a file or directory of earlier results, so that it is not overwritten.

Used by `rollout.cli.generate`, by the training job, the doctor and the metrics of `trainer_hooks`,
by an example and by benchmarks.
"""

from __future__ import annotations

import os
from itertools import chain, count, takewhile
from pathlib import Path


def set_aside(path: Path) -> Path | None:
    """Rename a file or directory to <path>.previous, or the first free of <path>.previous-2, ...
    Returns the new path. Returns None if there is nothing at `path`, or an empty file, or something
    that holds no results, such as a pipe."""
    if not (path.is_dir() or (path.is_file() and path.stat().st_size)):
        return None
    number = len(paths_set_aside(path)) + 1
    aside = path.with_name(f"{path.name}.previous" + f"-{number}" * (number > 1))
    os.rename(path, aside)
    return aside


def paths_set_aside(path: Path) -> list[Path]:
    """Return the paths to which `set_aside` renamed earlier results of `path`, oldest first."""
    first = path.with_name(f"{path.name}.previous")
    numbered = (path.with_name(f"{first.name}-{number}") for number in count(2))
    return list(takewhile(Path.exists, chain([first], numbered)))
