"""CheckpointWriter: writes tensors one by one to safetensors files with an index.

Used by `rollout.weights.transports.directory` for pushes and by
`trainer_hooks.weight_sync.weight_files`. The directory transport also writes to ReusableFiles,
which keep their memory for a later push, and reads a file with `map_tensors`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from io import FileIO
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from rollout.errors import ModelError, WeightUpdateError
from rollout.models.checkpoints.reader import INDEX_FILE
from rollout.parallel.shared_memory import (
    MappedFile,
    lock_for_reading,
    lock_for_writing,
    map_for_reading,
    unlock,
)

# The header is at the start of a file, but is written last. Tensors begin at a multiple of 8 bytes.
_HEADER_BYTES = (1 << 16) - 8
_EMPTY_HEADER_BYTES = 64
_MAX_FILE_BYTES = 4 << 30
DTYPES: Mapping[torch.dtype, str] = {
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


class CheckpointFile(Protocol):
    """A file that CheckpointWriter writes: PlainFile or ReusableFile. Every method can raise
    OSError."""

    @property
    def name(self) -> str: ...

    def write_at(self, start: int, bytes_N: memoryview) -> None:
        """Write the bytes at offset `start`."""
        ...

    def room(self, start: int, num_bytes: int) -> Tensor:
        """Return memory mapped to bytes [start, start + num_bytes), uint8."""
        ...

    def end(self, num_bytes: int) -> None:
        """End writing. `num_bytes` is the size of the file."""
        ...


class PlainFile:
    """A CheckpointFile on any file system. It is not mapped, so `room` raises
    NotImplementedError."""

    def __init__(self, path: Path) -> None:
        """Create or overwrite the file. Raises OSError."""
        self._file, self.name = FileIO(path, "w"), path.name

    def write_at(self, start: int, bytes_N: memoryview) -> None:
        self._file.seek(start)
        while bytes_N:
            bytes_N = bytes_N[self._file.write(bytes_N) or 0 :]  # at most 2 GiB at once

    def room(self, start: int, num_bytes: int) -> Tensor:
        raise NotImplementedError("a PlainFile is not mapped; call write_at")

    def end(self, num_bytes: int) -> None:
        self._file.close()


class CheckpointWriter:
    """Writes tensors one by one to safetensors files. A context manager, which ends the last file.

    A new file begins when the next tensor would exceed `max_file_bytes`, would not fit into the
    header, or would not start at a multiple of its item size. Call `write_index` at the end,
    because a checkpoint without an index is not valid.
    """

    def __init__(
        self,
        directory: Path,
        max_file_bytes: int = _MAX_FILE_BYTES,
        open_file: Callable[[Path], CheckpointFile] = PlainFile,
    ) -> None:
        self._directory, self._max_file_bytes = directory, max_file_bytes
        self._open_file = open_file
        self._file: CheckpointFile | None = None
        self._header: dict[str, Any] = {}
        self._num_bytes = self._total_bytes = self._num_files = 0
        self._header_bytes = _EMPTY_HEADER_BYTES
        self._file_names: dict[str, str] = {}  # by tensor

    def __enter__(self) -> CheckpointWriter:
        return self

    def __exit__(self, *exception: object) -> None:
        self._end_file(is_whole=exception[0] is None)

    def write(self, name: str, values: Tensor) -> None:
        """Append a contiguous CPU tensor. Raises OSError, and WeightUpdateError for a dtype that
        safetensors files cannot store."""
        file, start = self._begin(name, values)
        bytes_N: Any = values.reshape(-1).view(torch.uint8).numpy()
        file.write_at(start, memoryview(bytes_N))

    def room_for(self, name: str, values: Tensor) -> Tensor:
        """Append a tensor like `values`, and return the mapped memory for its values. The caller
        must copy the values there. The memory has the shape and dtype of `values`. Raises OSError
        and WeightUpdateError as `write` does."""
        file, start = self._begin(name, values)
        return file.room(start, values.nbytes).view(values.dtype).view(values.shape)

    def _begin(self, name: str, values: Tensor) -> tuple[CheckpointFile, int]:
        """Add a tensor to the header. Return the tensor's file and its offset there, in bytes."""
        dtype = DTYPES.get(values.dtype)
        if dtype is None:
            raise WeightUpdateError(
                f"{name!r} has dtype {values.dtype}, which safetensors files cannot store; cast it"
            )
        entry_bytes = len(json.dumps(name)) + 24 * values.dim() + 128
        file = self._file_for(values, entry_bytes)
        start, end = self._num_bytes, self._num_bytes + values.nbytes
        self._header[name] = {
            "dtype": dtype,
            "shape": list(values.shape),
            "data_offsets": [start, end],
        }
        self._num_bytes, self._header_bytes = end, self._header_bytes + entry_bytes
        self._total_bytes += values.nbytes
        return file, 8 + _HEADER_BYTES + start

    def write_index(self, metadata: Mapping[str, str]) -> None:
        """Write the index atomically, which completes the checkpoint. Call this after the `with`
        block. Raises OSError."""
        index = {
            "metadata": {"total_size": self._total_bytes, **metadata},
            "weight_map": self._file_names,
        }
        part = self._directory / f"{INDEX_FILE}.part"
        part.write_text(json.dumps(index), encoding="utf-8")
        os.replace(part, self._directory / INDEX_FILE)

    def _file_for(self, values: Tensor, entry_bytes: int) -> CheckpointFile:
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
            self._file = self._open_file(path)
        return self._file

    def _end_file(self, *, is_whole: bool) -> None:
        file, self._file = self._file, None
        if file is None:
            return
        if is_whole:
            # transformers refuses a file whose metadata names no framework.
            of_file = {"__metadata__": {"format": "pt"}, **self._header}
            header = json.dumps(of_file, separators=(",", ":")).encode()
            size = _HEADER_BYTES.to_bytes(8, "little")
            file.write_at(0, memoryview(size + header.ljust(_HEADER_BYTES)))
        file.end(8 + _HEADER_BYTES + self._num_bytes)
        self._file_names |= dict.fromkeys(self._header, file.name)
        self._header, self._header_bytes, self._num_bytes = {}, _EMPTY_HEADER_BYTES, 0


_BY_NAME = {name: dtype for dtype, name in DTYPES.items()}
_CAPACITY = 1 << 36  # maximum bytes of a file; only the used bytes take memory


class ReusableFile:
    """A CheckpointFile on tmpfs, which stays mapped and can be rewritten while it has no reader."""

    def __init__(self, path: Path) -> None:
        """Create the file and lock it for writing. Raises OSError, also if the file exists."""
        self.path = path
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        try:
            lock_for_writing(self._descriptor)
            self._file = MappedFile(self._descriptor, _CAPACITY)
        except BaseException:
            os.close(self._descriptor)
            raise

    @property
    def name(self) -> str:
        return self.path.name

    def reopen(self, path: Path) -> bool:
        """Lock the file for writing, move it to `path`, and return True. Return False if it has a
        reader. Raises OSError."""
        if not lock_for_writing(self._descriptor):
            return False
        self.move_to(path)
        return True

    def move_to(self, path: Path) -> None:
        """Rename the file. Raises OSError."""
        os.rename(self.path, path)
        self.path = path

    def write_at(self, start: int, bytes_N: memoryview) -> None:
        values_N = torch.frombuffer(bytearray(bytes_N), dtype=torch.uint8)
        self._file.room(start, len(values_N)).copy_(values_N)

    def room(self, start: int, num_bytes: int) -> Tensor:
        return self._file.room(start, num_bytes)

    def end(self, num_bytes: int) -> None:
        self._file.cut(num_bytes)
        unlock(self._descriptor)

    def close(self) -> None:
        """Delete the file. Processes that have mapped it keep its bytes."""
        self.path.unlink(missing_ok=True)
        os.close(self._descriptor)


def map_tensors(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a safetensors file, as views of the mapped file. A shared lock keeps a
    ReusableFile from being rewritten while a view exists. There is no lock on file systems without
    locks. Raises ModelError naming a file that is invalid or being written."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            lock_for_reading(descriptor)
        except BlockingIOError:
            os.close(descriptor)
            raise
        except OSError:
            pass  # a network file system without locks, where no file is rewritten
        bytes_N = map_for_reading(descriptor, os.fstat(descriptor).st_size)
        num_header_bytes = int.from_bytes(_bytes_of(bytes_N[:8]), "little")
        data_N = bytes_N[8 + num_header_bytes :]
        header: Mapping[str, Any] = json.loads(_bytes_of(bytes_N[8 : 8 + num_header_bytes]))
        return {
            name: _tensor(data_N, entry) for name, entry in header.items() if name != "__metadata__"
        }
    except (OSError, ValueError, KeyError, TypeError, RuntimeError, AttributeError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from error


def _tensor(data_N: Tensor, entry: Mapping[str, Any]) -> Tensor:
    start, end = entry["data_offsets"]
    if end > len(data_N):
        raise ValueError(f"the file ends before byte {end} of its tensors")
    return data_N[start:end].view(_BY_NAME[entry["dtype"]]).view(entry["shape"])


def _bytes_of(bytes_N: Tensor) -> bytes:
    values: Any = bytes_N.numpy()
    return bytes(values.tobytes())
