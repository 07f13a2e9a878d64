"""Checkpoint files in memory: read under a lock, and written again once nobody reads them."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rollout.errors import ModelError
from rollout.models.checkpoints.writer import DTYPES
from rollout.parallel.mapped_file import (
    MappedFile,
    lock_for_reading,
    lock_for_writing,
    map_for_reading,
    unlock,
)

_BY_NAME = {name: dtype for dtype, name in DTYPES.items()}
_CAPACITY = 1 << 36  # bytes of a file, of which only those that are used take memory


class SpareFile:
    """A CheckpointFile of a file system in memory, which stays mapped and can be written again."""

    def __init__(self, path: Path) -> None:
        """Raises OSError."""
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

    def reopened(self, path: Path) -> bool:
        """Whether nobody reads it; then it lies at `path`, is locked, and is to be written."""
        if not lock_for_writing(self._descriptor):
            return False
        self.move_to(path)
        return True

    def move_to(self, path: Path) -> None:
        """Raises OSError."""
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
        """Remove it; its readers keep its bytes."""
        self.path.unlink(missing_ok=True)
        os.close(self._descriptor)


def map_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file: views of it, which is not written while one lives, if the
    file system knows locks.

    Raises ModelError naming the file.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            lock_for_reading(descriptor)
        except BlockingIOError:
            os.close(descriptor)
            raise
        except OSError:
            pass  # a file system of other hosts, where no file is written again
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
        raise ValueError(f"it ends before byte {end} of its tensors")
    return data_N[start:end].view(_BY_NAME[entry["dtype"]]).view(entry["shape"])


def _bytes_of(bytes_N: Tensor) -> bytes:
    values: Any = bytes_N.numpy()
    return bytes(values.tobytes())
