"""The benchmark of suspend and resume runs, and its numbers add up."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.suspend_resume import main


@pytest.mark.slow
def test_a_small_run_writes_page_json_and_plot(tmp_path: Path) -> None:
    plot = tmp_path / "plot.png"
    main(["--small", "--output", str(tmp_path), "--plot", str(plot)])
    (page,) = tmp_path.glob("*.md")
    written = json.loads(page.with_suffix(".json").read_text())
    assert plot.stat().st_size > 0
    assert len(written["cycles"]) == 2 * 3 * 3
    for row in written["cycles"]:
        assert f"| {row['mode']} | {row['memory_kind']} |" in page.read_text()
        is_offload = row["mode"] == "offload"
        per_block = row["pool_bytes"] // (row["pool_bytes"] // 2**13)
        assert (row["bytes_moved"] > 0) == is_offload
        assert row["bytes_released"] == (0 if row["mode"] == "persist" else row["pool_bytes"])
        if is_offload:
            assert row["bytes_moved"] == row["bytes_restored"]
            assert row["bytes_moved"] <= row["live_fraction"] * row["pool_bytes"] + per_block
            assert row["suspend_over_floor"] > 0 < row["resume_over_floor"]
    assert written["persist"]["repeats"] == 50
    assert written["recompute"]["prefill_cpu_seconds"] > 0
    assert written["recompute"]["over_floor"] > 0
    assert 0 < written["update"]["stall_seconds"] < written["update"]["seconds"]
    for place in ("in_process", "engine_process"):
        gaps = written["update_gaps"][place]
        assert len(gaps["gaps"]) == len(gaps["reported"]) == 2
        assert all(gap > stall for gap, stall in zip(gaps["gaps"], gaps["reported"], strict=True))
