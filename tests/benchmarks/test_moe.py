"""The benchmark of a mixture runs against transformers. How fast anything is, is not tested."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.moe import main


@pytest.mark.slow
def test_the_ratio_is_to_the_best_way_that_transformers_runs_experts(tmp_path: Path) -> None:
    main(["--small", "--rounds", "1", "--output", str(tmp_path)])
    (path,) = tmp_path.glob("*.json")
    written = json.loads(path.read_text())
    (played,) = written["workloads"]["W1"]["rounds"]
    seconds = played["cpu_seconds"]
    peers = [who for who in seconds if who != "rollout"]
    assert len(peers) == 4
    assert {"grouped_mm", "eager"} <= {word for who in peers for word in who.split()}
    assert played["ratio"] == pytest.approx(min(map(seconds.get, peers)) / seconds["rollout"])
    assert written["largest_logprob_error"] < 1e-4
    (page,) = tmp_path.glob("*.md")
    assert "| rollout |" in page.read_text()
