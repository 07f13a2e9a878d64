"""PrivateFolder: a folder of files that only this user can read and write.

Used by `rollout.launch.slurm` and `rollout.launch.torchrun` for the arguments and keys of engines.
The arguments are pickled, so whoever can write such a file can run code. Therefore each read checks
the owner and the mode of the folder and of the file.
"""

from __future__ import annotations

import os
import re
import stat
import uuid
from pathlib import Path

from rollout.errors import ConfigError

_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_OTHERS_USE = stat.S_IRWXG | stat.S_IRWXO
_NAME = re.compile(r"[a-z]+-[0-9a-f]{32}")


class PrivateFolder:
    """A folder that only this user can write, which several machines may share. `write` chooses the
    name of a file, and `read` accepts only such names. So no name leads out of the folder."""

    def __init__(self, path: str | Path) -> None:
        """Make the folder if it is missing. Raises ConfigError if that fails, if the folder belongs
        to another user, or if others can write it."""
        self.path = Path(path).absolute()
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"the folder {str(self.path)!r} cannot be made: {error}; name another folder"
            ) from error
        self._check()

    def write(self, kind: str, content: bytes) -> str:
        """Write a new file that only this user can read. Returns its name, which begins with
        `kind`. Raises ConfigError if the folder is not private any more or cannot be written."""
        self._check()
        name = f"{kind}-{uuid.uuid4().hex}"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            with open(os.open(self.path / name, flags, 0o600), "wb") as file:
                file.write(content)
        except OSError as error:
            raise ConfigError(f"{str(self.path)!r} cannot be written to: {error}") from error
        return name

    def read(self, name: str) -> bytes:
        """Return the content of a file that `write` made. Raises ConfigError for any other name,
        for a missing file, and if another user owns the file or can read or write it."""
        self._check()
        if not _NAME.fullmatch(name):
            raise ConfigError(f"{name!r} is not the name of a file that a launcher has written")
        path = self.path / name
        try:
            with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "rb") as file:
                status = os.fstat(file.fileno())
                if not stat.S_ISREG(status.st_mode):
                    raise ConfigError(f"{str(path)!r} is not a regular file")
                _require_own(path, status, _OTHERS_USE, "use")
                return file.read()
        except OSError as error:
            raise ConfigError(
                f"{str(path)!r} cannot be read: {error}; all ranks and nodes must see the folder"
            ) from error

    def remove(self, name: str) -> None:
        """Remove a file. Does nothing if the file is gone."""
        (self.path / name).unlink(missing_ok=True)

    def _check(self) -> None:
        try:
            status = self.path.lstat()
        except OSError as error:
            raise ConfigError(f"the folder {str(self.path)!r} cannot be used: {error}") from error
        if not stat.S_ISDIR(status.st_mode):
            raise ConfigError(
                f"{str(self.path)!r} is not a folder; give a folder, not a link to one"
            )
        _require_own(self.path, status, _OTHERS_WRITE, "write")


def _require_own(path: Path, status: os.stat_result, modes: int, what: str) -> None:
    if status.st_uid != os.getuid():
        raise ConfigError(
            f"{str(path)!r} belongs to user {status.st_uid}, not to this one ({os.getuid()}), and "
            "arguments of engines are read from this user's files only; name another folder"
        )
    if status.st_mode & modes:
        raise ConfigError(
            f"other users may {what} {str(path)!r} (mode {status.st_mode & 0o777:04o}): "
            "run chmod go-rwx on it if no other user has changed it, or name another folder"
        )
