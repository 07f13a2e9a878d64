"""ScheduleRecorder: writes the routing decisions of a run as one JSON file.

Made and closed by `rollout.coordinator.coordinator`; `rollout.coordinator.core.dispatcher` records.
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
    """Writes {policy, data_parallel_size, num_requests, records: [{request_id, rank_index,
    num_hashes}]} to `path` when it is closed; until then `path` stays as it was.

    A record is one assignment: a request that was assigned again, to another rank, has two. Raises
    ConfigError if `path` is a folder or its folder cannot be written to. A later fault, such as a
    full disk, is logged, and no file is written.
    """

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
        """Add one assignment, unless closed."""
        if not self._is_closed:
            self._numbers.extend((request_id, rank_index, num_hashes))

    def close(self) -> None:
        """Write the file, which replaces an older one atomically. A second call does nothing."""
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
