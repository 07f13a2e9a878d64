"""benchmarks/update.py with a tiny model."""

from __future__ import annotations

from benchmarks.update import WAYS, main


def test_update_benchmark_measures_all_ways_of_a_group() -> None:
    (found,) = main(["--small", "--rounds", "1"])
    assert list(found) == list(WAYS)
    assert all(result.cpu_s > 0.0 for result in found.values())
