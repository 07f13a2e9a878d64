"""The benchmark that counts calls and files runs, and counts the same again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.call_counts import count_calls, main
from rollout.version_spans import VersionSpans


def test_calls_are_counted_by_the_file_that_defines_them() -> None:
    calls = count_calls(lambda: VersionSpans([(2, 1)]).slice(0, 1))
    # Two objects are made, a slice is taken, its one run is iterated, and two runs are appended.
    assert set(calls) == {"version_spans.py"}
    assert calls.total() >= 6


@pytest.mark.slow
def test_each_operation_is_listed_and_counts_are_the_same_in_each_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "counts.json"
    counts = main(["--files", "--json", str(path)])
    assert json.loads(path.read_text(encoding="utf-8")) == counts
    printed = capsys.readouterr().out
    assert "one decode step of 2 rows" in printed
    assert "scheduling/scheduler.py" in printed
    assert all(calls.total() > 0 for calls in counts.values())
    assert main([]) == counts
