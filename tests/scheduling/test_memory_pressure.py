"""Steps and recomputation in a small pool, against a scheduler that knows every output length."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.scheduling import POOL_FRACTIONS, Workload, measure, workloads
from rollout.scheduling.forecast import OutputLengthEstimator


@pytest.mark.drawn(4)
@pytest.mark.parametrize("fraction", POOL_FRACTIONS)
@pytest.mark.parametrize("workload", workloads(256), ids=lambda workload: workload.name)
def test_a_small_pool_costs_few_steps_and_little_recomputation(
    workload: Workload, fraction: float
) -> None:
    (outcome,) = measure([workload], [fraction], advance=lambda: None)
    assert outcome.steps_over_oracle <= 1.25
    assert outcome.recomputed_fraction <= 0.15


def last_blocks(estimator: OutputLengthEstimator, current: int, limit: int) -> list[float]:
    """Where an output that has begun block `current` may end: for draws of 5%, 15%, ... 95%."""
    draws = -np.log1p(-np.arange(0.05, 1.0, 0.1))
    ones = np.ones(len(draws))
    return estimator.last_blocks(current * ones, limit * ones, draws).tolist()


def test_outputs_are_expected_at_their_limits_as_long_as_none_has_stopped() -> None:
    estimator = OutputLengthEstimator()
    for _ in range(100):
        estimator.begin(0, 8)
    assert last_blocks(estimator, 3, 40) == [40.0] * 10


def test_expected_lengths_follow_outputs_that_got_as_far() -> None:
    estimator = OutputLengthEstimator()
    for _ in range(300):
        for length in (2, 10):
            estimator.begin(0, length)
            estimator.stop(length - 1)
    assert set(last_blocks(estimator, 0, 40)) == {1.0, 9.0}
    assert last_blocks(estimator, 0, 40).count(1.0) == 5
    assert last_blocks(estimator, 2, 40) == [9.0] * 10
    assert last_blocks(estimator, 2, 5) == [5.0] * 10


def test_running_outputs_count_beside_outputs_that_ended_early() -> None:
    estimator = OutputLengthEstimator()
    for number in range(100):
        estimator.begin(0, 1 if number < 20 else 12)
        if number < 20:
            estimator.stop(0)
    expected = last_blocks(estimator, 0, 400)
    assert expected[:2] == [0.0, 0.0]
    assert min(expected[2:]) >= 11.0


def test_old_output_lengths_lose_weight_as_lengths_drift() -> None:
    estimator = OutputLengthEstimator()
    for length in (3, 20):
        for _ in range(8192):
            estimator.begin(0, length)
            estimator.stop(length - 1)
    assert last_blocks(estimator, 0, 40)[1:] == [19.0] * 9
