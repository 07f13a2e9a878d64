"""The schedule of a run: complete when closed, nothing before, no service lost over a full disk."""

from __future__ import annotations

import json
import logging
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from rollout.coordinator.routing.schedule_recorder import ScheduleRecorder
from rollout.errors import ConfigError


@contextmanager
def files_limited_to(num_bytes: int) -> Iterator[None]:
    """What a full disk does: writing further raises OSError."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_the_schedule_lists_every_assignment_in_order(tmp_path: Path) -> None:
    path = tmp_path / "schedule.json"
    recorder = ScheduleRecorder(path, "longest_prefix", 3)
    records = [{"request_id": i, "rank_index": i % 3, "num_hashes": 2 * i} for i in range(5000)]
    for record in records:
        recorder.record(**record)
    recorder.close()
    assert json.loads(path.read_text()) == {
        "policy": "longest_prefix",
        "data_parallel_size": 3,
        "num_requests": len(records),
        "records": records,
    }


def test_a_run_without_requests_has_an_empty_schedule(tmp_path: Path) -> None:
    ScheduleRecorder(tmp_path / "schedule.json", "round_robin", 1).close()
    written = json.loads((tmp_path / "schedule.json").read_text())
    assert (written["num_requests"], written["records"]) == (0, [])


def test_an_older_schedule_stays_until_the_new_one_is_complete(tmp_path: Path) -> None:
    path = tmp_path / "schedule.json"
    path.write_text("older")
    recorder = ScheduleRecorder(path, "round_robin", 1)
    recorder.record(1, 0, 0)
    assert path.read_text() == "older"
    assert list(tmp_path.iterdir()) == [path]
    recorder.close()
    written = path.read_text()
    recorder.record(2, 0, 0)
    recorder.close()
    assert path.read_text() == written
    assert list(tmp_path.iterdir()) == [path]


def test_a_path_that_cannot_be_written_is_refused_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is a folder"):
        ScheduleRecorder(tmp_path, "round_robin", 1)
    with pytest.raises(ConfigError, match="cannot be written"):
        ScheduleRecorder(tmp_path / "missing" / "schedule.json", "round_robin", 1)


@pytest.mark.parametrize("num_records", [10, 1000])  # it shows on closing, or before
def test_a_full_disk_costs_the_schedule_and_nothing_else(
    tmp_path: Path, num_records: int, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "schedule.json"
    path.write_text("older")
    recorder = ScheduleRecorder(path, "round_robin", 1)
    with caplog.at_level(logging.ERROR), files_limited_to(100):
        for number in range(num_records):
            recorder.record(number, 0, 0)
        recorder.close()
    recorder.close()
    (logged,) = caplog.records
    assert str(path) in logged.getMessage()
    assert path.read_text() == "older"
    assert list(tmp_path.iterdir()) == [path]
