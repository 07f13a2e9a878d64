"""The benchmark of the coordinator runs, and its page shows what was measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import coordinator
from benchmarks.coordinator_fleet import WAYS
from tests.processes import PROCESSES

pytestmark = pytest.mark.distributed


@pytest.mark.slow
def test_a_small_run_writes_page_and_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # All tests share the process that is forked, which imports nothing more once it is there.
    assert PROCESSES.get_start_method() == "forkserver"
    monkeypatch.setattr(coordinator, "preload", lambda: None)
    results = coordinator.main(["--small", "--output", str(tmp_path)])
    (page,) = tmp_path.glob("*-coordinator-*.md")
    assert json.loads(page.with_suffix(".json").read_text()) == results
    (case,) = results["cases"]
    for way in WAYS:
        assert len(case["rounds"][way]) == 2
        for sample in case["rounds"][way]:
            assert sample["requests_per_s"] > 0
            assert 0 < sample["p50_s"] <= sample["p99_s"]
            assert sample["cpu_s"] > 0
    assert f"**{case['throughput_of_relay']['bare']:.2f}**" in page.read_text()
    assert f"{results['routing']['largest_growth']:.2f}" in page.read_text()
