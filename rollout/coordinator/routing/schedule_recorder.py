"""ScheduleRecorder: writes the routing decisions of a run to one JSON file.

Made and closed by `rollout.coordinator.coordinator`. `rollout.coordinator.core.dispatcher` records
each decision. The file is written when the recorder is closed.
"""

from __future__ import annotations

import json
import logging
import os
from array import array
from pathlib import Path

from rollout.errors import ConfigError

_logger = logging.getLogger(__name__)


class ScheduleRecorder:
    """Keeps assignments of requests to ranks in memory, and writes them to `path` when it is
    closed.

    The file has the form {policy, data_parallel_size, num_requests, records: [{request_id,
    rank_index, num_hashes}]}. There is one record per assignment, so a request that was assigned
    twice has two. Raises ConfigError if `path` is a folder or cannot be written. A fault while
    writing is logged, and no file is written."""

    def __init__(self, path: str | Path, policy: str, data_parallel_size: int) -> None:
        self._path = Path(path)
        self._head = {"policy": policy, "data_parallel_size": data_parallel_size}
        self._numbers = array("q")  # 24 bytes a record
        self._is_closed = False
        if self._path.is_dir():
            raise ConfigError(f"schedule_output_path={str(path)!r} is a folder; name a file in it")
        if not os.access(self._path.parent, os.W_OK):
            raise ConfigError(
                f"schedule_output_path={str(path)!r} cannot be written: {str(self._path.parent)!r} "
                "is not a folder that this process may write to"
            )

    def record(self, request_id: int, rank_index: int, num_hashes: int) -> None:
        """Add one assignment, unless the recorder is closed."""
        if not self._is_closed:
            self._numbers.extend((request_id, rank_index, num_hashes))

    def close(self) -> None:
        """Write the file. An older file is replaced atomically. A second call does nothing."""
        if self._is_closed:
            return
        self._is_closed = True
        head = json.dumps({**self._head, "num_requests": len(self._numbers) // 3})
        unfinished = self._path.with_name(f"{self._path.name}.{os.getpid()}.part")
        numbers = iter(self._numbers)
        names = ("request_id", "rank_index", "num_hashes")
        try:
            with unfinished.open("w") as file:
                file.write(f'{head[:-1]}, "records": [')
                for number, record in enumerate(zip(numbers, numbers, numbers, strict=True)):
                    line = json.dumps(dict(zip(names, record, strict=True)))
                    file.write((",\n" if number else "\n") + line)
                file.write("\n]}\n")
            unfinished.replace(self._path)
        except OSError as fault:
            unfinished.unlink(missing_ok=True)
            _logger.error("the schedule is not written to %s: %s", self._path, fault)
