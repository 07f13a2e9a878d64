"""DirectoryTransport: pushes as checkpoints in a directory, which other hosts may see, too.

    root/push-<number>-<random>/model-00001.safetensors ...
    root/push-<number>-<random>/model.safetensors.index.json     written last

The index makes a push valid: engines do not read a directory without it. The last committed push
stays, for engines that come late.

In a file system in memory, whose readers are all on this host, released files are reused by the
push after the next: new memory costs more than the copy. Each reader holds a lock on them for as
long as it has a view of a tensor.
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
    """files: reusable files of the push."""

    directory: Path
    source: WeightsSource
    files: tuple[ReusableFile, ...]


class DirectoryTransport(KeptTransport[_Push]):
    """A WeightTransport: `publish` writes a checkpoint, which engines map.

    Engines see the directory under the same path: on a shared file system, or on a local one if all
    are on this host. A program that can write there decides what engines serve.
    """

    kind = "directory"

    def __init__(self, root: str | Path, *, reject_non_finite: bool = True) -> None:
        """`root` is created if it is missing. Raises ConfigError if that fails."""
        self._root = Path(root).absolute()
        self._reader = TensorReader(reject_non_finite=reject_non_finite)
        super().__init__(self._keep_spare)
        self._num_pushes = 0
        self._spare: list[ReusableFile] = []
        try:
            self._root.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"no directory for weights at {self._root}: {error}") from error
        self._is_in_memory = _is_in_memory(self._root)

    def publish(
        self, named_tensors: NamedTensors, *, builds_on: str | None = None
    ) -> WeightsSource:
        """Write tensors, on whatever device, to a new directory. See WeightTransport.

        `builds_on`: as in a WeightsSource, for a DeltaTransport. Raises WeightUpdateError also if
        the tensors cannot be written.
        """
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
                f"the weights cannot be written to {directory} ({error}); make room, or name "
                "another directory"
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
        """Release all weights. A second call does nothing."""
        super().close()
        self._close_spare()

    def _write(
        self, named_tensors: NamedTensors, directory: Path, files: list[ReusableFile]
    ) -> str:
        """Write a checkpoint and return its checksum. Reusable files are appended to `files`.

        Files are closed, so that readers on other hosts see all of them. They are not flushed to
        the disk: they are of no use once this process has ended.
        """
        if self._is_in_memory:

            def opened(path: Path) -> ReusableFile:
                files.append(self._file_at(path))
                return files[-1]

            with CheckpointWriter(directory, open_file=opened) as writer:
                checksum = self._reader.read_into(named_tensors, writer.room_for)
        else:
            with CheckpointWriter(directory) as writer:
                checksum = self._reader.read(named_tensors, writer.write)
        writer.write_index({"tensors_checksum": checksum})
        return checksum

    def _file_at(self, path: Path) -> ReusableFile:
        """Return a locked file for `path`: a spare one without readers if there is one, else a new
        one."""
        for index, file in enumerate(self._spare):
            if file.reopen(path):
                return self._spare.pop(index)
        return ReusableFile(path)

    def _keep_spare(self, push: _Push) -> None:
        """Remove a released push, and keep its reusable files as the spare ones."""
        if push.files:
            self._close_spare()
            # A reader looks for the index again once it has locked all files.
            (push.directory / INDEX_FILE).unlink(missing_ok=True)
            for number, file in enumerate(push.files):
                file.move_to(self._root / f".spare-{os.getpid()}-{uuid.uuid4().hex[:8]}-{number}")
            self._spare = list(push.files)
        _remove(push.directory)

    def _close_spare(self) -> None:
        while self._spare:
            self._spare.pop().close()


def fetch_directory(source: WeightsSource) -> dict[str, Tensor]:
    """Return the tensors of `source`, on the CPU: views of its files, which live as long as they.

    Raises WeightUpdateError if the files are gone, or belong to another push.
    """
    directory = Path(source.address)
    try:
        if not directory.is_absolute():
            raise ModelError("it is no absolute path")
        names = _file_names(directory, source)
        tensors: dict[str, Tensor] = {}
        for name in names:
            tensors |= map_tensors(directory / name)
        if not (directory / INDEX_FILE).is_file():
            raise ModelError("they were released before all of them were locked")
        return tensors
    except (ModelError, OSError) as error:
        raise WeightUpdateError(
            f"the weights in {source.address!r} cannot be read ({error}); is the trainer alive, "
            "and does this host see its directory under that path?"
        ) from error


def _file_names(directory: Path, source: WeightsSource) -> list[str]:
    """Return the names of the source's files. Raises ModelError if they are gone, or another
    push's."""
    index = read_json(directory / INDEX_FILE)
    checksum = (index.get("metadata") or {}).get("tensors_checksum")
    if checksum != source.tensors_checksum:
        raise ModelError(f"its checksum is {checksum}, not {source.tensors_checksum}")
    names = sorted(set(index.get("weight_map", {}).values()))
    if odd := [name for name in names if Path(name).name != name]:
        raise ModelError(f"its index lists {odd[0]!r}, which is outside")
    return names


def _is_in_memory(directory: Path) -> bool:
    """Return whether the directory lies in a file system in this host's memory."""
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
    except OSError as error:  # the push is over, and does not fail because of it
        _logger.warning("weights are left in %s: %s", directory, error)
