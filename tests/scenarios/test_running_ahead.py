"""On a device that lets the host run ahead, the next step is launched before the last one is known.

No request depends on it. A CPU's work is done when its launch returns; the engine only commits it
later, as on a device.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import cycle
from typing import Any

import pytest

from rollout import DynamicInferenceEngine, DynamicInferenceRequest, SamplingParams
from tests.engine.faulty_backend import failing_steps
from tests.tiny_models import (
    Finished,
    Margins,
    drain,
    generate_all,
    pool_gb,
    prompt_of,
    suspend_and_resume,
    tiny_engine,
    tiny_model,
)

NUM_REQUESTS = 16


@cache
def model() -> Any:
    return tiny_model("qwen3", seed=6)


@cache
def jobs() -> tuple[tuple[list[int], SamplingParams], ...]:
    """Return jobs, two of three of which end early by a known token."""
    chooser = random.Random(3)
    prompts = [prompt_of(chooser.choice((1, 8, 9, 30, 70)), seed=i) for i in range(NUM_REQUESTS)]
    free = [
        SamplingParams(
            num_tokens_to_generate=chooser.randint(1, 40),
            seed=i,
            temperature=(0.0, 1.0)[i % 2],
            skip_prompt_log_probs=i % 4 > 0,
            return_log_probs=True,
            presence_penalty=1.5 * (i % 3 == 0),
            repetition_penalty=1.5 if i % 4 < 2 else 1.0,
        )
        for i in range(NUM_REQUESTS)
    ]
    drawn = generate_all(tiny_engine(model()), list(zip(prompts, free, strict=True)))
    ends = [chooser.choice(request.generated_tokens) for request in drawn]
    params = [
        replace(free[i], termination_id=ends[i]) if i % 3 else free[i] for i in range(NUM_REQUESTS)
    ]
    return tuple(zip(prompts, params, strict=True))


@cache
def step_by_step() -> tuple[DynamicInferenceRequest, ...]:
    return tuple(generate_all(tiny_engine(model()), jobs()))


def engine_running_ahead(
    next_fault: Callable[[], str | None] = lambda: None, **config: Any
) -> DynamicInferenceEngine:
    change = failing_steps(next_fault, overlaps=True)
    return tiny_engine(model(), change_backend=change, **config)


def with_jobs(engine: DynamicInferenceEngine) -> DynamicInferenceEngine:
    for i, (prompt, params) in enumerate(jobs()):
        engine.add_request(prompt, params, request_id=i)
    return engine


def assert_as_step_by_step(finished: Finished) -> None:
    margins = Margins()
    assert sorted(finished) == list(range(NUM_REQUESTS))
    for i, reference in enumerate(step_by_step()):
        margins.compare(model(), finished[i], reference.generated_tokens)
        assert finished[i].finish_reason == reference.finish_reason
    margins.check()


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"enable_chunked_prefill": True, "max_tokens": 24},
        {"num_blocks": 20},
        {"num_blocks": 20, "paused_buffer_size_gb": 0.0},
        {"max_requests": 3},
        {"enable_prefix_caching": True, "prefix_caching_eviction_policy": "lru", "num_blocks": 40},
    ],
    ids=str,
)
def test_tokens_are_those_of_one_step_at_a_time(config: dict[str, Any]) -> None:
    engine = with_jobs(engine_running_ahead(**config))
    assert_as_step_by_step(drain(engine))
    stats = engine.stats()
    assert stats.num_blocks_used == 0
    assert engine.num_steps_in_flight == 0
    if config.get("num_blocks") == 20:
        assert stats.num_evictions > 0


def test_a_step_is_launched_before_the_previous_one_is_committed() -> None:
    engine = with_jobs(engine_running_ahead())
    engine.step()
    assert engine.num_steps_in_flight == 1
    engine.pause()
    assert engine.num_steps_in_flight == 0


@pytest.mark.parametrize("mode", ["persist", "offload", "recompute"])
def test_suspend_finds_no_step_in_flight(mode: str) -> None:
    engine, finished = with_jobs(engine_running_ahead()), {}
    while engine.has_unfinished_requests():
        for _ in range(3):
            finished |= {record.request_id: record.merge() for record in engine.step()}
        suspend_and_resume(engine, mode)
    assert_as_step_by_step(finished)


def test_an_update_in_flight_stamps_tokens_before_and_after_it() -> None:
    engine, finished = with_jobs(engine_running_ahead()), {}
    before: dict[int, list[int]] = {i: [] for i in range(NUM_REQUESTS)}
    version = 0
    while engine.has_unfinished_requests():
        for _ in range(4):
            finished |= {record.request_id: record.merge() for record in engine.step()}
        version += 1
        engine.update_weights(model().state_dict(), version, in_flight=True)
        for i in set(before) - set(finished):
            before[i].append(len(engine.get_record(i).merge().generated_tokens))
    assert_as_step_by_step(finished)
    for i, request in finished.items():
        num_prompt, num_generated = len(request.prompt_tokens), len(request.generated_tokens)
        versions = [request.policy_spans.version_at(num_prompt + k) for k in range(num_generated)]
        assert versions == [sum(k >= count for count in before[i]) for k in range(num_generated)]


@pytest.mark.parametrize("place", ["launch", "fetch"])
def test_a_step_that_fails_loses_no_request(place: str) -> None:
    faults, finished = cycle([None, None, None, None, place]), {}
    engine = with_jobs(engine_running_ahead(lambda: next(faults)))
    while engine.has_unfinished_requests():
        finished |= {record.request_id: record.merge() for record in engine.step()}
    assert engine.stats().num_failed_steps > 5
    assert_as_step_by_step(finished)


def test_an_abort_between_steps_takes_only_its_own_request() -> None:
    engine, finished = with_jobs(engine_running_ahead(buffer_size_gb=pool_gb(model(), 40))), {}
    longest = max(range(NUM_REQUESTS), key=lambda i: len(step_by_step()[i].generated_tokens))
    while engine.has_unfinished_requests():
        finished |= {record.request_id: record.merge() for record in engine.step()}
        if longest not in finished and engine.stats().num_steps == 5:
            aborted = engine.abort_request(longest).merge()
            finished[longest] = aborted
    reference = step_by_step()[longest].generated_tokens
    assert 0 < len(aborted.generated_tokens) < len(reference)
    assert aborted.generated_tokens == reference[: len(aborted.generated_tokens)]
    finished[longest] = step_by_step()[longest]
    assert_as_step_by_step(finished)
    assert engine.stats().num_blocks_used == 0
