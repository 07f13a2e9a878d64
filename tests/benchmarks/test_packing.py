"""The measurement of packing runs, and its page has a row for each way."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import packing


@pytest.mark.slow
def test_each_way_is_measured_in_each_round(tmp_path: Path) -> None:
    results = packing.main(["--small", "--output", str(tmp_path)])
    assert {name: len(values) for name, values in results["seconds"].items()} == {
        "fixed rows": 1,
        "padded": 1,
        "packed": 1,
    }
    assert "| packed |" in next(tmp_path.glob("*.md")).read_text()
