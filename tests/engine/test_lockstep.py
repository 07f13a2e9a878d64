"""Two engines that get the same commands make the same plans."""

from __future__ import annotations

import random
from copy import deepcopy
from functools import cache
from typing import Any

import pytest

from rollout import EngineState
from tests.engine.inboxes import Command, random_config, random_inbox
from tests.engine.random_engines import weights
from tests.engine.trace import trace_decisions
from tests.fakes import values_of
from tests.run_seed import run_seed
from tests.tiny_models import IS_LONG, tiny_engine

NUM_SCHEDULES = 100 if IS_LONG else 40
NUM_PARTS = 4


@cache
def tensors(index: int) -> dict[str, Any]:
    return dict(weights(index)[0].named_parameters())


def live(config: dict[str, Any], inbox: list[Command]) -> list[list[object]]:
    """All plans of an engine that is given the whole inbox, and then runs dry."""
    engine = tiny_engine(deepcopy(weights(0)[0]), **config)
    decisions = trace_decisions(engine)
    for command in inbox:
        command(engine)
    assert engine.state is EngineState.RUNNING
    while engine.has_unfinished_requests():
        engine.step()
    return [values_of(d.schedule.plan) for d in decisions if d.schedule.plan is not None]


@pytest.mark.drawn(2)
@pytest.mark.parametrize("part", range(NUM_PARTS))
def test_engines_fed_one_inbox_make_equal_plans(part: int) -> None:
    num_plans = 0
    for seed in range(part, NUM_SCHEDULES, NUM_PARTS):
        rng = random.Random(run_seed() + seed)
        config, inbox = random_config(rng), random_inbox(rng, tensors)
        first, second = live(config, inbox), live(config, inbox)
        assert first == second
        num_plans += len(first)
    assert num_plans > NUM_SCHEDULES / NUM_PARTS  # more than one a schedule


def test_another_inbox_makes_other_plans() -> None:
    rng = random.Random(0)
    config = random_config(rng)
    assert live(config, random_inbox(rng, tensors)) != live(config, random_inbox(rng, tensors))
