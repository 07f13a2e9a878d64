"""A folder in the user's cache directory that no other user can write, and locks on its files.

Used by `rollout.backends.cpu.library`, `rollout.launch.torchrun` and
`rollout.models.checkpoints.smollm2`.
"""

from __future__ import annotations

import fcntl
import logging
import os
import stat
import tempfile
from pathlib import Path
from typing import TextIO

logger = logging.getLogger(__name__)


def private_folder(name: str) -> Path:
    """Create a folder that only this user can write, if it does not exist, and return it. The
    folder is `rollout/NAME` in the user's cache directory. If that fails, it is `rollout-NAME-UID`
    in the temporary directory. Raises OSError if both fail."""
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
            logger.debug("cannot use cache folder %s: %s", folder, error)
    raise OSError(f"no private cache folder can be made; tried {[str(f) for f in candidates]}")


def _is_private(folder: Path) -> bool:
    status = folder.lstat()
    others_write = status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not others_write


def try_lock(file: TextIO) -> bool:
    """Lock `file` until it is closed, and return True. Return False if another process has it
    locked. On a file system without locks, return True without a lock."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        logger.debug("cannot lock %s: %s", file.name, error)
    return True
