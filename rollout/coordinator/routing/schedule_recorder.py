"""ScheduleRecorder: the routing decisions of a run, as one JSON file."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import tempfile
from pathlib import Path

from rollout.errors import ConfigError

_logger = logging.getLogger(__name__)


class ScheduleRecorder:
    """Writes {policy, data_parallel_size, num_requests, records: [{request_id, rank_index,
    num_hashes}]} to `path` when it is closed; until then `path` stays as it was.

    A record is one assignment, so a request that moved to another rank counts again. Records wait
    in an unnamed file of the same folder: a killed process leaves nothing behind. Raises
    ConfigError if that folder cannot be written to. When its disk fills up later, that is logged
    and the schedule is given up, since requests matter more.
    """

    def __init__(self, path: str | Path, policy: str, data_parallel_size: int) -> None:
        self._path = Path(path)
        self._policy = policy
        self._data_parallel_size = data_parallel_size
        self._num_records = 0
        if self._path.is_dir():
            raise ConfigError(f"schedule_output_path={str(path)!r} is a folder; name a file in it")
        try:
            self._lines = tempfile.TemporaryFile("w+", dir=self._path.parent)  # noqa: SIM115
        except OSError as fault:
            raise ConfigError(
                f"schedule_output_path={str(path)!r} cannot be written: {fault}"
            ) from fault

    def record(self, request_id: int, rank_index: int, num_hashes: int) -> None:
        """Add one assignment, unless closed or given up."""
        if self._lines.closed:
            return
        record = {"request_id": request_id, "rank_index": rank_index, "num_hashes": num_hashes}
        try:
            self._lines.write((",\n" if self._num_records else "\n") + json.dumps(record))
        except OSError as fault:
            self._give_up(fault)
        self._num_records += 1

    def close(self) -> None:
        """Write the file, replacing an older one at once. A second call does nothing."""
        if self._lines.closed:
            return
        head = {
            "policy": self._policy,
            "data_parallel_size": self._data_parallel_size,
            "num_requests": self._num_records,
        }
        unfinished = self._path.with_name(f"{self._path.name}.{os.getpid()}.part")
        try:
            with unfinished.open("w") as file:
                file.write(json.dumps(head)[:-1] + ', "records": [')
                self._lines.seek(0)
                file.writelines(self._lines)
                file.write("\n]}\n")
            unfinished.replace(self._path)
            self._lines.close()
        except OSError as fault:
            unfinished.unlink(missing_ok=True)
            self._give_up(fault)

    def _give_up(self, fault: OSError) -> None:
        _logger.error("the schedule is not written to %s: %s", self._path, fault)
        # What is still buffered fails again on closing.
        with contextlib.suppress(OSError):
            self._lines.close()
