"""benchmarks/pushes.py with a tiny model."""

from __future__ import annotations

from benchmarks.pushes import main


def test_push_benchmark_measures_a_copy_and_both_pushes() -> None:
    uses = main(["--small", "--rounds", "1"])
    assert list(uses) == ["one copy", "weights discarded", "in flight"]
    assert all(use.wall_s > 0.0 for use in uses.values())
