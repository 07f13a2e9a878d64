"""A folder in the user's cache directory for what takes time to make."""

from __future__ import annotations

import logging
import os
import stat
import tempfile
from pathlib import Path

logger = logging.getLogger(__name__)


def private_folder(name: str) -> Path:
    """A folder that only this user can write. OSError if there is none."""
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    candidates = (
        Path(home) / "rollout" / name,
        Path(tempfile.gettempdir()) / f"rollout-{name}-{os.getuid()}",
    )
    for folder in candidates:
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if _is_private(folder) and os.access(folder, os.W_OK):
                return folder
        except OSError as error:
            logger.debug("nothing is kept in %s: %s", folder, error)
    raise OSError(f"no private folder to keep files in; tried {[str(f) for f in candidates]}")


def write_atomically(path: Path, content: bytes) -> None:
    """Another process sees all of the new content, or the old file."""
    handle, unfinished = tempfile.mkstemp(suffix=".tmp", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        os.replace(unfinished, path)
    finally:
        Path(unfinished).unlink(missing_ok=True)


def _is_private(folder: Path) -> bool:
    status = folder.lstat()
    others_write = status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not others_write
