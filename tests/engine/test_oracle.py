"""Random lives of a small real engine are those that a model without paging derives."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.engine.engine_life import EngineLife
from tests.tiny_models import IS_LONG, MAX_EXCEPTIONS_PER_TOKEN

NUM_SCHEDULES = 300 if IS_LONG else 30
# Which tokens are drawn, and with them which lives, differs between processors in the last bit.
MIN_OF_EACH = NUM_SCHEDULES // 5
WHAT_MUST_HAPPEN = (
    "copies on write",
    "evictions",
    "forks",
    "hit tokens of older versions",
    "pauses",
    "prefix hit tokens",
    "tokens over mixed context",
)


def test_random_lives_of_an_engine_are_those_of_the_oracle(
    capsys: pytest.CaptureFixture[str],
) -> None:
    run_state_machine_as_test(
        EngineLife,
        settings=settings(
            max_examples=NUM_SCHEDULES,
            stateful_step_count=40 if IS_LONG else 25,
            derandomize=True,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
    tally, exceptions = EngineLife.tally, EngineLife.exceptions
    with capsys.disabled():
        print(f"\n{len(exceptions)} tokens that only rounding explains;", dict(tally))
    assert tally["schedules"] >= NUM_SCHEDULES
    assert len(exceptions) <= max(1.0, tally["tokens"] * MAX_EXCEPTIONS_PER_TOKEN)
    for name in WHAT_MUST_HAPPEN:
        assert tally[name] >= MIN_OF_EACH, name
