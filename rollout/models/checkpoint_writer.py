"""CheckpointWriter: tensors as they come into safetensors files, and an index of the files."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from io import FileIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rollout.errors import WeightUpdateError
from rollout.models.checkpoint import INDEX_FILE

_HEADER_BYTES = 1 << 16  # of a file: its tensors are known last, but stand first
_EMPTY_HEADER_BYTES = 64
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


class CheckpointWriter:
    """Writes safetensors files as tensors come, so that none has to be held. A context manager.

    In each file the header has a fixed size and is written last. A new file begins where the header
    is full, and where the next tensor would not lie at a multiple of its item's size.
    """

    def __init__(self, directory: Path, max_file_bytes: int = _MAX_FILE_BYTES) -> None:
        self._directory, self._max_file_bytes = directory, max_file_bytes
        self._file: FileIO | None = None
        self._header: dict[str, Any] = {}
        self._num_bytes = self._total_bytes = self._num_files = 0
        self._header_bytes = _EMPTY_HEADER_BYTES
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
                # transformers refuses a file that does not say for which framework it is.
                of_file = {"__metadata__": {"format": "pt"}, **self._header}
                header = json.dumps(of_file, separators=(",", ":")).encode()
                file.seek(0)
                size = _HEADER_BYTES.to_bytes(8, "little")
                _write_all(file, memoryview(size + header.ljust(_HEADER_BYTES)))
        self._file_names |= dict.fromkeys(self._header, Path(str(file.name)).name)
        self._header, self._header_bytes, self._num_bytes = {}, _EMPTY_HEADER_BYTES, 0


def _write_all(file: FileIO, left: memoryview) -> None:
    while left:
        left = left[file.write(left) or 0 :]  # at most 2 GiB at once
