"""What the benchmark of asynchronous training makes of the metrics that runs leave."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pytest

from benchmarks.async_training import (
    KINDS,
    SHARES,
    WARM_STEPS,
    WINDOW_STEPS,
    as_markdown,
    bootstrap_interval,
    figures_of,
    summary_of,
)

NUM_STEPS = 3 * WINDOW_STEPS


def rows(gain: float, step_s: float) -> list[dict[str, Any]]:
    """A run whose reward rises by `gain` with each step; the first steps are slow."""
    shares = {f"timing_share/{name}": 0.01 for name in SHARES}
    shares["timing_share/train"] = 1.0 - 0.01 * (len(SHARES) - 1)
    steps = [
        {
            "reward": gain * step,
            "timing_s/step": step_s if step >= WARM_STEPS else 100.0,
            "engine/idle_share": 0.5,
            "policy_staleness/max": step % 2,
            **shares,
        }
        for step in range(NUM_STEPS)
    ]
    return [{"eval/greedy_reward": 0.1}, *steps, {"eval/greedy_reward": 30 * gain}]


def test_figures_are_those_of_the_windows_and_of_the_last_evaluation() -> None:
    run = figures_of("by turns", 0, rows(0.01, step_s=2.0))
    assert run.reward_first == pytest.approx(0.045)
    assert run.reward_last == pytest.approx(0.245)
    assert run.greedy_after == pytest.approx(0.3)
    assert run.step_s == 2.0
    assert run.max_staleness == 1
    assert run.share_sum_error < 1e-12


def test_runs_of_one_seed_are_compared() -> None:
    runs = [
        figures_of(
            kind, seed, rows(0.01 + 0.001 * (kind == "asynchronous"), 2.0 - (kind != "by turns"))
        )
        for seed in range(3)
        for kind in KINDS
    ]
    summary = summary_of(runs)
    assert summary["mean_reward_difference"] == pytest.approx(0.0245)
    assert summary["mean_greedy_difference"] == pytest.approx(0.03)
    assert summary["bootstrap_90"] == pytest.approx((0.0245, 0.0245))
    assert summary["speedup"] == 2.0
    machine = {"cpu": "a processor", "num_cores": 2, "torch": "2"}
    page = as_markdown(
        {
            "date": "2026-01-01",
            "machine": machine,
            "overrides": ["a=1"],
            "summary": summary,
            "runs": [asdict(run) for run in runs],
        }
    )
    table = [line for line in page.splitlines() if line.startswith("|")]
    assert len(table) == 2 + len(runs)
    assert len({line.count("|") for line in table}) == 1
    assert "greedy: +0.030. A step by turns takes 2.00 times as long." in page


def test_a_bootstrap_interval_holds_most_means_of_the_differences() -> None:
    low, high = bootstrap_interval([-0.02, 0.0, 0.04])
    assert -0.02 <= low < 0.02 / 3 < high <= 0.04
