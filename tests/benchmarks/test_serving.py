"""The benchmark of serving runs, and its page shows what was measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.serving import main

pytestmark = pytest.mark.distributed


@pytest.mark.slow
def test_a_small_run_writes_page_and_json(tmp_path: Path) -> None:
    results = main(["--small", "--output", str(tmp_path), "--cache", str(tmp_path / "cache")])
    (page,) = tmp_path.glob("*-serving-*.md")
    assert json.loads(page.with_suffix(".json").read_text()) == results
    (rows,) = results["rounds"]
    assert set(rows) == {"LLM.generate", "rollout serve"}
    for row in rows.values():
        assert row["tokens_per_cpu_s"] > 0
        assert row["first_token_ms"] > 0
    served = rows["rollout serve"]
    assert {name for name in served if name.startswith("cpu_share_of_")} == {
        f"cpu_share_of_{name}" for name in ("server", "coordinator", "engine")
    }
    ratio = results["medians"]["rollout serve"]["tokens_per_cpu_s_of_generate"]
    assert f"**{ratio:.2f}**" in page.read_text()
