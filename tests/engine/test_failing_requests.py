"""A request whose forward passes raise ends with its error; all other requests go on."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest

from rollout import DynamicInferenceEngine, DynamicInferenceRequest, SamplingParams, Status
from tests.tiny_models import (
    Finished,
    drain,
    generate_all,
    prompt_of,
    suspend_and_resume,
    tiny_engine,
    tiny_model,
)

POISON = 210
MAX_STEPS = 120
Jobs = list[tuple[list[int], SamplingParams]]


@cache
def model() -> Any:
    return tiny_model(seed=8)


def healthy_jobs() -> Jobs:
    """Three requests without the poisonous token, one of them with log-probs."""
    return [
        ([token % POISON for token in prompt_of(length, seed=length)], params(10, seed=length))
        for length in (5, 9, 20)
    ]


def params(num_tokens: int, **changes: Any) -> SamplingParams:
    return SamplingParams(num_tokens_to_generate=num_tokens, **({"seed": 3} | changes))


@cache
def undisturbed() -> list[list[int]]:
    tokens = [r.generated_tokens for r in generate_all(tiny_engine(model()), healthy_jobs())]
    assert not any(POISON in each for each in tokens)
    return tokens


def engine_failing(fails: Callable[[Any], bool], **config: Any) -> DynamicInferenceEngine:
    """Return an engine whose model raises in each forward pass for whose batch `fails` is true."""

    def forward(batch: Any) -> None:
        if fails(batch):
            raise ArithmeticError("this forward pass cannot be done")

    return tiny_engine(model(), before_forward=forward, **config)


def is_poisoned(batch: Any) -> bool:
    return bool((batch.token_ids_T == POISON).any())


def add_healthy(engine: DynamicInferenceEngine) -> list[int]:
    return [engine.add_request(prompt, sampling) for prompt, sampling in healthy_jobs()]


def names(request: DynamicInferenceRequest) -> list[str]:
    return [event.type.name for event in request.events]


def assert_failed(request: DynamicInferenceRequest) -> None:
    assert (request.status, request.finish_reason) == (Status.FAILED, "error")
    assert names(request)[-2:] == ["ERROR_NONTRANSIENT", "FAIL"]
    with pytest.raises(ArithmeticError, match="cannot be done"):
        raise request.events[-2].payload


def assert_unharmed(finished: Finished, ids: list[int]) -> None:
    assert [finished[i].generated_tokens for i in ids] == undisturbed()


def test_a_request_whose_steps_fail_ends_with_the_error_and_others_go_on() -> None:
    engine = engine_failing(is_poisoned)
    healthy = add_healthy(engine)
    culprit = engine.add_request([4, POISON, 5], params(6))
    finished = drain(engine, MAX_STEPS)
    assert_failed(finished[culprit])
    assert names(finished[culprit]) == [
        *("ADD_ENGINE", "ERROR_TRANSIENT", "ERROR_TRANSIENT", "ERROR_NONTRANSIENT", "FAIL")
    ]
    assert_unharmed(finished, healthy)
    assert names(finished[healthy[0]]).count("ERROR_TRANSIENT") == 2
    stats = engine.stats()
    assert (stats.num_failed_steps, stats.num_blocks_used) == (3, 0)


def test_error_events_of_a_failed_step_keep_no_tensors_alive() -> None:
    engine = engine_failing(is_poisoned)
    culprit = engine.add_request([4, POISON, 5], params(6))
    finished = drain(engine, MAX_STEPS)
    errors = [e.payload for e in finished[culprit].events if e.payload is not None]
    assert [error.__traceback__ for error in errors] == [None, None]


def test_all_samples_of_a_failing_prompt_end_and_other_groups_go_on() -> None:
    engine = engine_failing(is_poisoned)
    healthy = add_healthy(engine)
    culprits = engine.add_group([POISON, 7], [params(6, seed=i) for i in range(4)])
    group = engine.add_group(healthy_jobs()[0][0], [healthy_jobs()[0][1]] * 3)
    finished = drain(engine, MAX_STEPS)
    for culprit in culprits:
        assert_failed(finished[culprit])
    assert_unharmed(finished, healthy)
    assert [finished[i].generated_tokens for i in group] == [undisturbed()[0]] * 3


def test_a_request_whose_second_chunk_fails_is_found() -> None:
    engine = engine_failing(is_poisoned, enable_chunked_prefill=True, max_tokens=16)
    culprit = engine.add_request([5] * 30 + [POISON], params(6))
    healthy = add_healthy(engine)
    finished = drain(engine, MAX_STEPS)
    assert_failed(finished[culprit])
    assert_unharmed(finished, healthy)


def test_a_request_whose_decode_steps_fail_is_found() -> None:
    def decodes_far(batch: Any) -> bool:
        return bool((batch.context_lens[: batch.num_decode_rows] >= 35).any())

    engine = engine_failing(decodes_far)
    healthy = add_healthy(engine)
    culprit = engine.add_request(prompt_of(33), params(20))
    finished = drain(engine, MAX_STEPS)
    assert_failed(finished[culprit])
    assert 2 <= len(finished[culprit].generated_tokens) <= 5
    assert_unharmed(finished, healthy)


def test_a_step_that_fails_only_as_a_whole_batch_ends_no_request() -> None:
    engine = engine_failing(lambda batch: len(batch.context_lens) > 2)
    healthy = add_healthy(engine)
    assert_unharmed(drain(engine, MAX_STEPS), healthy)


def test_abort_request_of_the_suspect_that_runs_alone_lets_others_go_on() -> None:
    engine = engine_failing(is_poisoned)
    culprit = engine.add_request([4, POISON, 5], params(6))
    healthy = add_healthy(engine)
    for _ in range(2):
        assert engine.step() == []
    assert engine.abort_request(culprit).current.finish_reason == "abort"
    assert_unharmed(drain(engine, MAX_STEPS), healthy)
    assert engine.stats().num_failed_steps == 2


def test_step_raises_and_ends_no_request_if_every_step_fails() -> None:
    is_broken = True
    engine = engine_failing(lambda _: is_broken)
    healthy = add_healthy(engine)
    for _ in range(2):
        assert engine.step() == []
    for _ in range(3):
        with pytest.raises(ArithmeticError, match="cannot be done"):
            engine.step()
    assert engine.stats().num_waiting == 3
    is_broken = False
    assert_unharmed(drain(engine, MAX_STEPS), healthy)


def test_pause_succeeds_if_the_step_in_flight_fails() -> None:
    engine = engine_failing(is_poisoned)
    culprit = engine.add_request([4, POISON, 5], params(6))
    engine.step()
    suspend_and_resume(engine, "recompute")
    assert_failed(drain(engine, MAX_STEPS)[culprit])


def test_an_interrupt_in_a_step_fails_no_request() -> None:
    interrupts = [KeyboardInterrupt()]

    def forward(_: Any) -> None:
        if interrupts:
            raise interrupts.pop()

    engine = tiny_engine(model(), before_forward=forward)
    healthy = add_healthy(engine)
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    finished = drain(engine, MAX_STEPS)
    assert_unharmed(finished, healthy)
    assert "ERROR_TRANSIENT" not in names(finished[healthy[0]])
