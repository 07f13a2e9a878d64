"""DirectoryTransport: pushes as checkpoints in a directory that engines of other hosts see, too.

    root/push-<number>-<random>/model-00001.safetensors ...
    root/push-<number>-<random>/model.safetensors.index.json     written last

The index makes a push valid: while it is missing, nobody reads the directory. The last committed
push stays, for engines that come late.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rollout.coordinator.protocol.weights_source import WeightsSource
from rollout.coordinator.weights.kept import KeptWeights
from rollout.coordinator.weights.reading import TensorReader, terms_of
from rollout.errors import ConfigError, ModelError, WeightUpdateError
from rollout.models.checkpoint import INDEX_FILE, Checkpoint, read_json
from rollout.runner.weight_update import NamedTensors

KIND = "directory"
_logger = logging.getLogger(__name__)
_HEADER_BYTES = 1 << 16  # of a file: its tensors are known last, but stand first
_MAX_FILE_BYTES = 4 << 30
_DTYPES: Mapping[torch.dtype, str] = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.int16: "I16",
    torch.int32: "I32",
    torch.int64: "I64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
}


@dataclass(frozen=True, slots=True)
class _Push:
    directory: Path
    source: WeightsSource


class DirectoryTransport:
    """A WeightTransport: `publish` writes a checkpoint, which engines map.

    Engines see the directory under the same path: a shared file system, or a local one with the
    engines of one host. Whoever can write there decides what engines serve.
    """

    kind = KIND

    def __init__(self, root: str | Path, *, reject_non_finite: bool = True) -> None:
        """`root`: made if it is missing. Raises ConfigError if that fails."""
        self._root = Path(root).absolute()
        self._reader = TensorReader(reject_non_finite=reject_non_finite)
        self._kept: KeptWeights[_Push] = KeptWeights(lambda old: _remove(old.directory))
        self._num_pushes = 0
        try:
            self._root.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"no directory for weights at {self._root}: {error}") from error

    @property
    def committed(self) -> WeightsSource | None:
        """The source of the last committed weights; None before the first commit."""
        return self._kept.committed

    def publish(
        self, named_tensors: NamedTensors, *, builds_on: str | None = None
    ) -> WeightsSource:
        """Write tensors, on whatever device, to a new directory. See WeightTransport. `builds_on`:
        as in a WeightsSource, for a DeltaTransport.

        Raises WeightUpdateError also if they cannot be written.
        """
        self.drop()
        lora = terms_of(named_tensors)
        self._num_pushes += 1
        directory = self._root / f"push-{self._num_pushes:06d}-{uuid.uuid4().hex[:8]}"
        try:
            directory.mkdir()
            with CheckpointWriter(directory) as writer:
                checksum = self._reader.read(named_tensors, writer.write)
            # Readers on other hosts see whole files, since they are closed; nobody needs them on
            # the disk, since they are of no use once this process has ended.
            writer.write_index({"tensors_checksum": checksum})
        except OSError as error:
            _remove(directory)
            raise WeightUpdateError(
                f"the weights cannot be written to {directory} ({error}); make room, or name "
                "another directory"
            ) from error
        except BaseException:
            _remove(directory)
            raise
        source = WeightsSource(
            kind=KIND,
            address=str(directory),
            manifest={},
            checksum="",
            tensors_checksum=checksum,
            lora=lora,
            builds_on=builds_on,
        )
        self._kept.begin(_Push(directory, source))
        return source

    def send(self, source: WeightsSource) -> None:
        """Do nothing: engines read the directory."""

    def commit(self) -> None:
        """Keep the published weights, and remove the earlier ones."""
        self._kept.commit()

    def drop(self) -> None:
        """Remove the published weights."""
        self._kept.drop()

    def close(self) -> None:
        """Remove all weights. A second call does nothing."""
        self._kept.clear()


class CheckpointWriter:
    """Writes safetensors files as tensors come, so that none has to be held. A context manager.

    In each file the header has a fixed size and is written last. A new file begins where the header
    is full, and where the next tensor would not lie at a multiple of its item's size.
    """

    def __init__(self, directory: Path, max_file_bytes: int = _MAX_FILE_BYTES) -> None:
        self._directory, self._max_file_bytes = directory, max_file_bytes
        self._file: FileIO | None = None
        self._header: dict[str, Any] = {}
        self._header_bytes = self._num_bytes = self._total_bytes = self._num_files = 0
        self._file_names: dict[str, str] = {}  # by tensor

    def __enter__(self) -> CheckpointWriter:
        return self

    def __exit__(self, *exception: object) -> None:
        self._end_file(is_whole=exception[0] is None)

    def write(self, name: str, values: Tensor) -> None:
        """Append a contiguous tensor of the host. Raises OSError, and WeightUpdateError for a dtype
        that safetensors lacks.
        """
        dtype = _DTYPES.get(values.dtype)
        if dtype is None:
            raise WeightUpdateError(f"{name!r} is {values.dtype}, which no safetensors file holds")
        entry_bytes = len(json.dumps(name)) + 24 * values.dim() + 128
        file = self._file_for(values, entry_bytes)
        bytes_N: Any = values.reshape(-1).view(torch.uint8).numpy()
        _write_all(file, memoryview(bytes_N))
        end = self._num_bytes + values.nbytes
        self._header[name] = {
            "dtype": dtype,
            "shape": list(values.shape),
            "data_offsets": [self._num_bytes, end],
        }
        self._num_bytes, self._header_bytes = end, self._header_bytes + entry_bytes
        self._total_bytes += values.nbytes

    def write_index(self, metadata: Mapping[str, str]) -> None:
        """Make the checkpoint valid, at once as a whole. Raises OSError."""
        index = {
            "metadata": {"total_size": self._total_bytes, **metadata},
            "weight_map": self._file_names,
        }
        part = self._directory / f"{INDEX_FILE}.part"
        part.write_text(json.dumps(index), encoding="utf-8")
        os.replace(part, self._directory / INDEX_FILE)

    def _file_for(self, values: Tensor, entry_bytes: int) -> FileIO:
        is_full = self._num_bytes + values.nbytes > self._max_file_bytes and self._num_bytes > 0
        if (
            self._file is None
            or is_full
            or self._header_bytes + entry_bytes > _HEADER_BYTES
            or self._num_bytes % values.dtype.itemsize
        ):
            self._end_file(is_whole=True)
            self._num_files += 1
            path = self._directory / f"model-{self._num_files:05d}.safetensors"
            self._file = FileIO(path, "w")
            self._file.seek(8 + _HEADER_BYTES)
        return self._file

    def _end_file(self, *, is_whole: bool) -> None:
        file, self._file = self._file, None
        if file is None:
            return
        with file:
            if is_whole:
                header = json.dumps(self._header, separators=(",", ":")).encode()
                file.seek(0)
                size = _HEADER_BYTES.to_bytes(8, "little")
                _write_all(file, memoryview(size + header.ljust(_HEADER_BYTES)))
        self._file_names |= dict.fromkeys(self._header, Path(str(file.name)).name)
        self._header, self._header_bytes, self._num_bytes = {}, 0, 0


def fetch_directory(source: WeightsSource) -> dict[str, Tensor]:
    """The tensors of `source`, on the CPU: views of its files, which live as long as they do.

    Raises WeightUpdateError if they are not there any more, or are not those of the source.
    """
    directory = Path(source.address)
    try:
        if not directory.is_absolute():
            raise ModelError("it is no absolute path")
        index = read_json(directory / INDEX_FILE)
        checksum = (index.get("metadata") or {}).get("tensors_checksum")
        if checksum != source.tensors_checksum:
            raise ModelError(f"its checksum is {checksum}, not {source.tensors_checksum}")
        return dict(Checkpoint.open(directory).items())
    except (ModelError, OSError) as error:
        raise WeightUpdateError(
            f"the weights in {source.address!r} cannot be read ({error}); is the trainer alive, "
            "and does this host see its directory under that path?"
        ) from error


def _write_all(file: FileIO, left: memoryview) -> None:
    while left:
        left = left[file.write(left) or 0 :]  # at most 2 GiB at once


def _remove(directory: Path) -> None:
    try:
        shutil.rmtree(directory)
    except FileNotFoundError:
        return
    except OSError as error:  # a push that is over does not fail because of it
        _logger.warning("weights are left in %s: %s", directory, error)
