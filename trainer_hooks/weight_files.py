"""WeightFiles: a trainer's weights as a directory of safetensors, which another process reads."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from rollout.errors import WeightUpdateError
from rollout.models.checkpoint import INDEX_FILE
from rollout.models.plain_tensors import full_tensor, refusal

STABLE_FILE = "STABLE"  # written last: whoever watches the directory may read it from now on
_SHARED_MEMORY = Path("/dev/shm")


class WeightFiles:
    """Writes tensors to shards of at least `max_shard_bytes`, and holds no more than one of them.

    All methods raise WeightUpdateError, for tensors that cannot be read and files that cannot be
    written.
    """

    def __init__(self, directory: Path, max_shard_bytes: int) -> None:
        self._directory, self._max_shard_bytes = directory, max_shard_bytes
        self._shard: dict[str, Tensor] = {}
        self._num_bytes = 0
        self._file_of_name: dict[str, str] = {}

    def add(self, name: str, tensor: Tensor) -> None:
        """Take a copy of a tensor; a sharded one is gathered, which is a collective."""
        if reason := refusal(tensor):
            raise WeightUpdateError(f"{name!r} {reason}")
        if name in self._shard or name in self._file_of_name:
            raise WeightUpdateError(f"{name!r} comes twice")
        # A copy: trainers gather the next tensor into the same memory, and tied ones share theirs.
        whole = full_tensor(tensor).detach().to("cpu", copy=True).contiguous()
        self._shard[name] = whole
        self._num_bytes += whole.nbytes
        if self._num_bytes >= self._max_shard_bytes:
            self._write_shard()

    def finish(self) -> None:
        """Write what is left, the index of the shards, and last the file STABLE."""
        if self._shard:
            self._write_shard()
        index = json.dumps({"metadata": {}, "weight_map": self._file_of_name})
        with _named_errors(self._directory):
            (self._directory / INDEX_FILE).write_text(index, encoding="utf-8")
            (self._directory / STABLE_FILE).touch()

    def _write_shard(self) -> None:
        number = len(set(self._file_of_name.values()))
        file_name = f"model-{number:05d}.safetensors"
        with _named_errors(self._directory):
            save_file(self._shard, self._directory / file_name, metadata={"format": "pt"})
        self._file_of_name |= dict.fromkeys(self._shard, file_name)
        self._shard, self._num_bytes = {}, 0


@contextmanager
def weight_directory(parent: Path | None = None) -> Iterator[Path]:
    """Yield a new directory, which is removed at the end. Raises WeightUpdateError.

    parent: None for shared memory, or the system's folder for temporary files.
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
    try:
        yield
    except OSError as error:
        raise WeightUpdateError(f"{directory} cannot be written to: {error}") from error
