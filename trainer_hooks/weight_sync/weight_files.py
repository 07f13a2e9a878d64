"""WeightFiles: writes a trainer's weights as a directory of safetensors for another process.

Used by `trainer_hooks.weight_sync.file_weight_transfer` and `rollout_verl.adapter`.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torch import Tensor

from rollout.errors import WeightUpdateError
from rollout.models.checkpoints.writer import CheckpointWriter
from rollout.models.plain_tensors import full_tensor, refusal

STABLE_FILE = "STABLE"  # written last, to tell other programs that the directory is complete
_SHARED_MEMORY = Path("/dev/shm")


class WeightFiles:
    """Writes tensors in order to files of at most `max_file_bytes`.

    A larger tensor gets its own file. This is a context manager. At the end of a block without an
    error it writes the index of the files, then the file STABLE. Methods raise WeightUpdateError
    for tensors that cannot be read and files that cannot be written.
    """

    def __init__(self, directory: Path, max_file_bytes: int) -> None:
        self._directory = directory
        self._writer = CheckpointWriter(directory, max_file_bytes)
        self._names: set[str] = set()

    def __enter__(self) -> WeightFiles:
        return self

    def add(self, name: str, tensor: Tensor) -> None:
        """Write a tensor. Gathering a sharded tensor is a collective."""
        if reason := refusal(tensor):
            raise WeightUpdateError(f"{name!r} {reason}")
        if name in self._names:
            raise WeightUpdateError(f"{name!r} comes twice")
        self._names.add(name)
        values = full_tensor(tensor).detach().cpu().contiguous()
        with _named_errors(self._directory):
            self._writer.write(name, values)

    def __exit__(self, *exception: object) -> None:
        with _named_errors(self._directory):
            self._writer.__exit__(*exception)
            if exception[0] is None:
                self._writer.write_index({})
                (self._directory / STABLE_FILE).touch()


@contextmanager
def weight_directory(parent: Path | None = None) -> Iterator[Path]:
    """Yield a new directory, which is removed at the end of the block.

    `parent`: folder of the directory. None means shared memory, or the system's temporary folder if
    there is none. Raises WeightUpdateError if the directory cannot be created.
    """
    if parent is None:
        parent = _SHARED_MEMORY if _SHARED_MEMORY.is_dir() else Path(tempfile.gettempdir())
    with _named_errors(parent):
        directory = Path(tempfile.mkdtemp(prefix="rollout-weights-", dir=parent))
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)


@contextmanager
def _named_errors(directory: Path) -> Iterator[None]:
    """Raise an OSError of the block as a WeightUpdateError that names `directory`."""
    try:
        yield
    except OSError as error:
        raise WeightUpdateError(f"{directory} cannot be written to: {error}") from error
