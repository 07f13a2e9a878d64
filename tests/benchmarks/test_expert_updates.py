"""The measurement of updates of experts runs, and its page has a row for each dialect."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import expert_updates


@pytest.mark.slow
def test_both_dialects_are_measured(tmp_path: Path) -> None:
    results = expert_updates.main(["--small", "--output", str(tmp_path)])
    dialects = results["models"]["small"]["dialects"]
    assert dialects["live"]["num_tensors"] + 2 * (3 * 8 - 2) == dialects["saved"]["num_tensors"]
    assert "| small | live |" in next(tmp_path.glob("*.md")).read_text()
