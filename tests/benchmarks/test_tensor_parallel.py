"""The measurement of tensor parallel runs, and its page has a row for each engine and batch."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import tensor_parallel


@pytest.mark.slow
def test_each_engine_is_measured_at_each_batch(tmp_path: Path) -> None:
    results = tensor_parallel.main(["--small", "--output", str(tmp_path)])
    names = [contestant.name for contestant in tensor_parallel.CONTESTANTS]
    assert {batch: [*found] for batch, found in results["steps"].items()} == {
        "1": names,
        "16": names,
    }
    page = next(tmp_path.glob("*.md")).read_text()
    assert page.count("| two ranks, one thread each |") == 2
