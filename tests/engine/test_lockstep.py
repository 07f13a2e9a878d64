"""Two engines fed one inbox make the same plans: nothing but the inbox and the tokens decides."""

from __future__ import annotations

import random
from collections.abc import Callable
from copy import deepcopy
from functools import cache
from typing import Any

import pytest

from rollout import DynamicInferenceEngine, EngineState, SamplingParams
from tests.engine.random_engines import SHARED_TEXT, VOCAB, weights
from tests.engine.trace import trace_decisions
from tests.fakes import values_of
from tests.run_seed import run_seed
from tests.tiny_models import IS_LONG, tiny_engine

NUM_SCHEDULES = 100 if IS_LONG else 40
NUM_PARTS = 4
Command = Callable[[DynamicInferenceEngine], object]


@cache
def tensors(index: int) -> dict[str, Any]:
    return dict(weights(index)[0].named_parameters())


def random_config(rng: random.Random) -> dict[str, Any]:
    has_prefixes = rng.random() < 0.7
    return {
        "num_blocks": rng.randint(5, 14),
        "block_size_tokens": 4,
        "max_sequence_length": 48,
        "max_requests": rng.randint(2, 6),
        "max_tokens": rng.randint(8, 24),
        "enable_chunked_prefill": rng.random() < 0.5,
        "max_kv_staleness_versions": rng.choice((None, None, 0, 1)),
        "enable_prefix_caching": has_prefixes,
        "prefix_caching_eviction_policy": rng.choice(("lru", "ref_zero"))
        if has_prefixes
        else "ref_zero",
        "prefix_reuse_across_versions": has_prefixes and rng.random() < 0.5,
    }


def random_inbox(rng: random.Random, length: int = 8) -> list[Command]:
    """Commands that depend on nothing but the engine they are given to."""
    makers = (_add, _add, _steps, _steps, _abort, _suspend, _update)
    return [_add(rng), *(rng.choice(makers)(rng) for _ in range(length))]


def _add(rng: random.Random) -> Command:
    prompt = SHARED_TEXT[: rng.randint(0, 12)] + rng.choices(range(VOCAB), k=rng.randint(1, 5))
    samples = [
        SamplingParams(num_tokens_to_generate=rng.randint(1, 9), seed=rng.randrange(9))
        for _ in range(rng.choice((1, 1, 3)))
    ]
    priority = rng.choice((0, 0, 1))
    return lambda engine: engine.add_group(prompt, samples, priority=priority)


def _steps(rng: random.Random) -> Command:
    count = rng.randint(1, 4)
    return lambda engine: [engine.step() for _ in range(count)]


def _abort(rng: random.Random) -> Command:
    choice = rng.random()

    def abort(engine: DynamicInferenceEngine) -> None:
        if alive := engine.request_ids():
            engine.abort_request(alive[int(choice * len(alive))])

    return abort


def _suspend(rng: random.Random) -> Command:
    mode, index = rng.choice(("persist", "offload", "recompute")), rng.randint(0, 2)

    def suspend(engine: DynamicInferenceEngine) -> None:
        engine.pause()
        engine.suspend(mode)
        if index:
            engine.update_weights(tensors(index))
        engine.resume()
        engine.unpause()

    return suspend


def _update(rng: random.Random) -> Command:
    index = rng.randint(1, 3)
    return lambda engine: engine.update_weights(tensors(index), in_flight=True)


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


@pytest.mark.parametrize("part", range(NUM_PARTS))
def test_engines_fed_one_inbox_make_equal_plans(part: int) -> None:
    num_plans = 0
    for seed in range(part, NUM_SCHEDULES, NUM_PARTS):
        rng = random.Random(run_seed() + seed)
        config, inbox = random_config(rng), random_inbox(rng)
        first, second = live(config, inbox), live(config, inbox)
        assert first == second
        num_plans += len(first)
    assert num_plans > 5 * NUM_SCHEDULES / NUM_PARTS


def test_another_inbox_makes_other_plans() -> None:
    rng = random.Random(0)
    config = random_config(rng)
    assert live(config, random_inbox(rng)) != live(config, random_inbox(rng))
