"""StepTimes and `longest_step_s`: bounds for a step, from measured steps."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout import SamplingParams
from rollout.engine.counters import StepTimes
from tests.tiny_models import prompt_of, tiny_engine, tiny_model

MAX_TOKENS = 4096
sizes = st.lists(st.integers(1, MAX_TOKENS), min_size=1, max_size=20)
costs = st.floats(0.0, 10.0)


@given(sizes=sizes, fixed_s=costs, per_token_s=costs)
def test_longest_s_bounds_a_step_of_all_tokens_whatever_was_measured(
    sizes: list[int], fixed_s: float, per_token_s: float
) -> None:
    """Steps cost a fixed time and a time for each token."""
    times = StepTimes()
    for size in sizes:
        times.add(size, fixed_s + per_token_s * size)
    longest = fixed_s + per_token_s * MAX_TOKENS
    assert times.longest_s(MAX_TOKENS) >= longest * (1 - 1e-9)


def test_longest_s_comes_near_once_large_steps_were_measured() -> None:
    times = StepTimes()
    times.add(1, 2.0)
    assert times.longest_s(MAX_TOKENS) == 2.0 * MAX_TOKENS
    times.add(MAX_TOKENS, 9.0)
    times.add(MAX_TOKENS, 5.0)
    assert times.longest_s(MAX_TOKENS) == 9.0, "the slowest of its size"


def test_longest_s_is_0_before_anything_was_measured() -> None:
    assert StepTimes().longest_s(MAX_TOKENS) == 0.0


def test_measure_step_runs_no_request_and_steps_are_measured_by_themselves() -> None:
    batches: list[int] = []
    engine = tiny_engine(
        tiny_model(), max_tokens=64, before_forward=lambda batch: batches.append(1)
    )
    assert engine.longest_step_s == 0.0
    engine.measure_step()
    first = engine.longest_step_s
    assert first > 0.0
    assert (len(batches), engine.stats().num_steps) == (2, 0)
    engine.add_request(prompt_of(40), SamplingParams(num_tokens_to_generate=2))
    while engine.has_unfinished_requests():
        engine.step()
    assert 0.0 < engine.longest_step_s <= first


@pytest.mark.parametrize("num_requests", [0, 3])
def test_measure_step_leaves_requests_as_they_are(num_requests: int) -> None:
    def tokens(*, measures: bool) -> list[list[int]]:
        engine = tiny_engine(tiny_model(), max_tokens=64)
        for i in range(num_requests):
            engine.add_request(prompt_of(9, seed=i), SamplingParams(num_tokens_to_generate=6))
        ended = [record for _ in range(2) for record in engine.step()]
        if measures:
            engine.measure_step()
        while engine.has_unfinished_requests():
            ended += engine.step()
        return [record.merge().generated_tokens for record in ended]

    assert tokens(measures=True) == tokens(measures=False)
