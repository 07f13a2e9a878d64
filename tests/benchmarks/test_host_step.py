"""The benchmark of the host's part of a step runs. How fast anything is, is not tested."""

from __future__ import annotations

import pytest

from benchmarks.host_step import PARTS, as_text, main


@pytest.mark.slow
def test_every_part_takes_time_and_is_shown() -> None:
    results = main(["--small"])
    assert [(case["num_rows"], case["has_log_probs"]) for case in results["cases"]] == [
        (1, False),
        (8, False),
        (1, True),
        (8, True),
    ]
    for case in results["cases"]:
        assert all(case[part] > 0 for part in PARTS)
        assert case["total"] == pytest.approx(sum(case[part] for part in PARTS))
        assert f"{case['total']:.2f}" in as_text(results)
    assert len(results["reports"]) == 4
    for case in results["reports"]:
        assert 0 < case["median"] <= case["p99"] <= case["longest"]
