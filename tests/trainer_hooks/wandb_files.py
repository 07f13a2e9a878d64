"""Reads the file of an offline wandb run: a log of protobuf records in LevelDB's log format."""

from __future__ import annotations

import json
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

BLOCK_BYTES = 32 * 1024
FILE_HEADER_BYTES = 7
CHUNK_HEADER = struct.Struct("<IHB")
FULL, FIRST, MIDDLE, LAST = 1, 2, 3, 4


def read_payloads(path: Path) -> Iterator[bytes]:
    """Return the records of the file. A record may be split into chunks that do not cross a
    block.
    """
    content, position, parts = path.read_bytes(), FILE_HEADER_BYTES, []
    while position + CHUNK_HEADER.size <= len(content):
        if BLOCK_BYTES - position % BLOCK_BYTES < CHUNK_HEADER.size:
            position += BLOCK_BYTES - position % BLOCK_BYTES
            continue
        _, length, kind = CHUNK_HEADER.unpack_from(content, position)
        position += CHUNK_HEADER.size
        if position + length > len(content):  # still being written
            return
        parts.append(content[position : position + length])
        position += length
        if kind in (FULL, LAST):
            yield b"".join(parts)
            parts = []


def read_history(directory: Path) -> list[dict[str, Any]]:
    """Return the logged rows, with NaN as None and without wandb's own keys, which begin with _."""
    return [_values(history.item) for history in read_records(directory, "history")]


def read_summary(directory: Path) -> dict[str, Any]:
    """Return the run's summary, without wandb's own keys."""
    updates = [_values(summary.update) for summary in read_records(directory, "summary")]
    return {name: value for update in updates for name, value in update.items()}


def read_records(directory: Path, kind: str, deadline_s: float = 30.0) -> list[Any]:
    """Return the records of a kind, such as "history", "summary" or "alert".

    Waits for the run's last record: wandb's process may still be writing when `finish` returns.
    """
    from wandb.proto import wandb_internal_pb2

    (path,) = directory.glob("wandb/offline-run-*/*.wandb")
    end_s = time.monotonic() + deadline_s
    while True:
        records = [wandb_internal_pb2.Record.FromString(p) for p in read_payloads(path)]
        kinds = [record.WhichOneof("record_type") for record in records]
        if "exit" in kinds:
            break
        assert time.monotonic() < end_s, f"no end of the run in {path}; it holds {kinds}"
        time.sleep(0.05)
    return [
        getattr(record, kind) for record, own in zip(records, kinds, strict=True) if own == kind
    ]


def _values(items: Any) -> dict[str, Any]:
    return {
        key: json.loads(item.value_json, parse_constant=lambda _: None)
        for item in items
        if not (key := item.key or "/".join(item.nested_key)).startswith("_")
    }
