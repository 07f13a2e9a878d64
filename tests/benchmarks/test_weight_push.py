"""The measurement of pushes runs, and its page has a row for each transport."""

from __future__ import annotations

from pathlib import Path

from benchmarks import weight_push


def test_each_transport_is_measured_over_one_copy(tmp_path: Path) -> None:
    results = weight_push.main(["--small", "--output", str(tmp_path)])
    assert [sorted(seconds) for seconds in results["seconds"]] == [
        ["collective", "directory", "shared"]
    ]
    page = next(tmp_path.glob("*.md")).read_text()
    assert all(f"| {kind} |" in page for kind in ("shared", "directory", "collective"))
