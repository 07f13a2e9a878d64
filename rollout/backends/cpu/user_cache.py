"""Files in the user's cache directory: private folders, atomic writes, locks between processes."""

from __future__ import annotations

import logging
import os
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

try:
    import fcntl
except ImportError:
    fcntl = None  # type: ignore[assignment]  # the platform is no Unix

_LOCK_RETRY_S = 0.01

logger = logging.getLogger(__name__)


def private_folder(name: str) -> Path:
    """Return a folder that only this user can write, and create it.

    It is `name` in the user's cache directory or, where that fails, in the temporary directory.
    Raises OSError if both fail.
    """
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
    """Replace the file at `path`: others see the whole old content or the new. Raises OSError."""
    handle, unfinished = tempfile.mkstemp(suffix=".tmp", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        os.replace(unfinished, path)
    finally:
        Path(unfinished).unlink(missing_ok=True)


@contextmanager
def exclusive_lock(path: Path, timeout_s: float) -> Iterator[None]:
    """Hold the lock of the file at `path`, which is created, against other processes and threads.

    Raises OSError where files cannot be locked, TimeoutError (an OSError) if another holder does
    not release the lock within `timeout_s`.
    """
    if fcntl is None:
        raise OSError("this platform has no flock")
    with path.open("ab") as file:
        _wait_for_lock(file, timeout_s)
        try:
            yield
        finally:
            # Closing is not enough: a child that was forked meanwhile has the file open, too.
            fcntl.flock(file, fcntl.LOCK_UN)


def _wait_for_lock(file: IO[bytes], timeout_s: float) -> None:
    end = time.monotonic() + timeout_s
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError as error:
            if time.monotonic() >= end:
                raise TimeoutError(f"{file.name} stayed locked for {timeout_s} s") from error
        time.sleep(_LOCK_RETRY_S)


def _is_private(folder: Path) -> bool:
    status = folder.lstat()
    others_write = status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not others_write
