"""DirectoryTransport: pushes as checkpoints in a directory, which can be on a shared file system.

    root/push-<number>-<random>/model-00001.safetensors ...
    root/push-<number>-<random>/model.safetensors.index.json     written last

The index makes a push valid: engines do not read a directory without it. The last committed push
stays, for engines that join later. On tmpfs, released files are kept and reused by a later push. A
reader holds a lock on a file while it has a view of a tensor.

Used by `rollout.weights.transports.registry`, and by `rollout.weights.transports.delta` to carry
deltas. Writes and deletes files below the root.
"""

from __future__ import annotations

import logging
import os
import shutil
import uuid
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from rollout.errors import ConfigError, ModelError, WeightUpdateError
from rollout.models.checkpoints.reader import INDEX_FILE, read_json
from rollout.models.checkpoints.writer import CheckpointWriter, ReusableFile, map_tensors
from rollout.weights.source import WeightsSource
from rollout.weights.transports.base import KeptTransport
from rollout.weights.transports.reading import TensorReader, terms_of
from rollout.weights.update import NamedTensors

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Push:
    """A published push. `files` has its reusable files, which exist only on tmpfs."""

    directory: Path
    source: WeightsSource
    files: tuple[ReusableFile, ...]


class DirectoryTransport(KeptTransport[_Push]):
    """A WeightTransport whose `publish` writes a checkpoint, which engines map. Engines must see
    the directory under the same path, so engines on other hosts need a shared file system. A
    program that can write there can change what engines serve."""

    kind = "directory"

    def __init__(self, root: str | Path, *, reject_non_finite: bool = True) -> None:
        """Create `root` if it is missing. Raises ConfigError if that fails."""
        self._root = Path(root).absolute()
        self._reader = TensorReader(reject_non_finite=reject_non_finite)
        super().__init__(self._keep_spare)
        self._num_pushes = 0
        # Released files on tmpfs: new memory would cost more than the copy.
        self._spare: list[ReusableFile] = []
        try:
            self._root.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"the directory {self._root} for weights cannot be created: {error}"
            ) from error
        self._is_in_memory = _is_in_memory(self._root)

    def publish(
        self, named_tensors: NamedTensors, *, builds_on: str | None = None
    ) -> WeightsSource:
        """Write tensors from any device to a new directory, and return its source. `builds_on` is a
        field of the WeightsSource, given by a DeltaTransport. Raises WeightUpdateError as
        WeightTransport says, and if the tensors cannot be written."""
        self.roll_back()
        lora = terms_of(named_tensors)
        self._num_pushes += 1
        directory = self._root / f"push-{self._num_pushes:06d}-{uuid.uuid4().hex[:8]}"
        files: list[ReusableFile] = []
        try:
            directory.mkdir()
            checksum = self._write(named_tensors, directory, files)
        except BaseException as error:
            for file in files:
                file.close()
            _remove(directory)
            if not isinstance(error, OSError):
                raise
            raise WeightUpdateError(
                f"the weights cannot be written to {directory} ({error}); free space there, or "
                "name another directory"
            ) from error
        source = WeightsSource(
            kind=self.kind,
            address=str(directory),
            manifest=b"",
            checksum="",
            tensors_checksum=checksum,
            lora=lora,
            builds_on=builds_on,
        )
        return self._begin(_Push(directory, source, tuple(files)))

    def close(self) -> None:
        """Release all weights and delete their files. A second call does nothing."""
        super().close()
        self._close_spare()

    def _write(
        self, named_tensors: NamedTensors, directory: Path, files: list[ReusableFile]
    ) -> str:
        """Write a checkpoint and return its checksum. Append reusable files to `files`, and close
        other files."""
        if self._is_in_memory:

            def opened(path: Path) -> ReusableFile:
                files.append(self._file_at(path))
                return files[-1]

            with CheckpointWriter(directory, open_file=opened) as writer:
                checksum = self._reader.read_into(named_tensors, writer.room_for)
        else:
            # Closed, so that readers on other hosts see all bytes. Not flushed to disk, because the
            # files are useless after this process has ended.
            with CheckpointWriter(directory) as writer:
                checksum = self._reader.read(named_tensors, writer.write)
        writer.write_index({"tensors_checksum": checksum})
        return checksum

    def _file_at(self, path: Path) -> ReusableFile:
        """Return a locked file for `path`: a spare file without readers, else a new file."""
        for index, file in enumerate(self._spare):
            if file.reopen(path):
                return self._spare.pop(index)
        return ReusableFile(path)

    def _keep_spare(self, push: _Push) -> None:
        """Delete a released push, but keep its reusable files as the new spares."""
        if push.files:
            self._close_spare()
            # A reader checks that the index exists after it has locked all files.
            (push.directory / INDEX_FILE).unlink(missing_ok=True)
            for number, file in enumerate(push.files):
                file.move_to(self._root / f".spare-{os.getpid()}-{uuid.uuid4().hex[:8]}-{number}")
            self._spare = list(push.files)
        _remove(push.directory)

    def _close_spare(self) -> None:
        while self._spare:
            self._spare.pop().close()


def fetch_directory(source: WeightsSource) -> dict[str, Tensor]:
    """Return the tensors of `source`, on the CPU, as views of its mapped files. Raises
    WeightUpdateError if the files are gone or invalid, or belong to another push."""
    directory = Path(source.address)
    try:
        if not directory.is_absolute():
            raise ModelError("the path is not absolute")
        names = _file_names(directory, source)
        tensors: dict[str, Tensor] = {}
        for name in names:
            tensors |= map_tensors(directory / name)
        if not (directory / INDEX_FILE).is_file():
            raise ModelError("the trainer released them meanwhile")
        return tensors
    except (ModelError, OSError) as error:
        raise WeightUpdateError(
            f"the weights in {source.address!r} cannot be read ({error}); check that the trainer "
            "is running, and that this host sees its directory under this path"
        ) from error


def _file_names(directory: Path, source: WeightsSource) -> list[str]:
    """Return the names of the source's files, from the index. Raises ModelError if the index is
    gone or invalid, or belongs to another push."""
    index = read_json(directory / INDEX_FILE)
    checksum = (index.get("metadata") or {}).get("tensors_checksum")
    if checksum != source.tensors_checksum:
        raise ModelError(f"the checksum is {checksum}, not {source.tensors_checksum}")
    names = sorted(set(index.get("weight_map", {}).values()))
    if odd := [name for name in names if Path(name).name != name]:
        raise ModelError(f"the index lists {odd[0]!r}, which is outside of the directory")
    return names


def _is_in_memory(directory: Path) -> bool:
    """Return whether the directory is on tmpfs, in this host's memory."""
    device = directory.stat().st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    try:
        mounts = Path("/proc/self/mountinfo").read_text(encoding="utf-8")
    except OSError:
        return False
    for line in mounts.splitlines():
        fields, _, rest = line.partition(" - ")
        if fields.split()[2] == number:
            return rest.split()[0] == "tmpfs"
    return False


def _remove(directory: Path) -> None:
    try:
        shutil.rmtree(directory)
    except FileNotFoundError:
        return
    except OSError as error:  # no reason for a push to fail
        _logger.warning("weights are left in %s: %s", directory, error)
