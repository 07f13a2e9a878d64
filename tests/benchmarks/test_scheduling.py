"""The benchmarks of scheduling run, and their pages show what was found."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import scheduling, scheduling_growth
from benchmarks.scheduling import Workload, oracle_steps, simulate


@pytest.mark.slow
def test_a_small_run_writes_page_and_json(tmp_path: Path) -> None:
    results = scheduling.main(["--small", "--output", str(tmp_path)])
    (page,) = tmp_path.glob("*-scheduling-*.md")
    assert json.loads(page.with_suffix(".json").read_text()) == results
    for outcome in results["outcomes"]:
        assert f"| {outcome['workload']} | {outcome['pool_fraction']:.0%} |" in page.read_text()
        assert outcome["num_generated"] <= outcome["steps"] * outcome["mean_batch"] + 1e-6


@pytest.mark.slow
def test_costs_are_measured_at_each_size(tmp_path: Path) -> None:
    results = scheduling_growth.main(["--small", "--output", str(tmp_path)])
    (page,) = tmp_path.glob("*-scheduling-growth-*.md")
    assert json.loads(page.with_suffix(".json").read_text()) == results
    for name, costs in results["costs"].items():
        assert len(costs) == len(results["sizes"])
        assert all(cost > 0 for cost in costs)
        assert f"| {name} |" in page.read_text()


@pytest.mark.parametrize(
    ("lengths", "num_blocks", "steps"),
    [
        ([8, 8], 4, 8),  # together: two blocks each
        ([8, 8], 3, 11),  # the second has its second block when the first has ended
        ([8, 8], 2, 16),  # one after the other
        ([9, 9, 1], 3, 13),  # likewise, and the third waits behind it
    ],
)
def test_the_oracle_starts_a_request_as_soon_as_all_of_its_future_fits(
    lengths: list[int], num_blocks: int, steps: int
) -> None:
    workload = Workload(name="", num_prompt=4, max_new=16, lengths=tuple(lengths), block_size=8)
    assert oracle_steps(workload, num_blocks) == steps


def test_a_simulated_request_ends_at_its_length_or_at_the_limit() -> None:
    workload = Workload(name="", num_prompt=4, max_new=6, lengths=(6, 2), block_size=4)
    steps, plans, num_evictions = simulate(workload, num_blocks=20)
    assert (steps, num_evictions) == (6, 0)
    assert [len(plan.sample_rows) for plan in plans] == [2, 2, 1, 1, 1, 1]
