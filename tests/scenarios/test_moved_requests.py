"""A request that one engine began continues in another engine with the same results."""

from __future__ import annotations

import random
from functools import cache
from typing import Any

import msgpack
import pytest
import torch
from numpy.testing import assert_allclose

from rollout import (
    DynamicInferenceEngine,
    DynamicInferenceRequest,
    DynamicInferenceRequestRecord,
    EngineStateError,
    InvalidRequestError,
    SamplingParams,
)
from tests.tiny_models import Margins, drain, generate_all, prompt_of, tiny_engine, tiny_model

NUM_REQUESTS = 12


@cache
def model() -> Any:
    return tiny_model("qwen3", seed=15)


@cache
def jobs() -> tuple[tuple[list[int], SamplingParams], ...]:
    chooser = random.Random(9)
    return tuple(
        (
            prompt_of(chooser.choice((1, 8, 9, 30)), seed=i),
            SamplingParams(
                num_tokens_to_generate=chooser.randint(4, 30),
                seed=i,
                temperature=(0.0, 1.0)[i % 2],
                return_log_probs=True,
                skip_prompt_log_probs=i % 3 > 0,
                top_n_logprobs=i % 3,
                return_ranks=i % 2 == 1,
                frequency_penalty=0.9 * (i % 4 == 1),
                repetition_penalty=1.5 if i % 4 < 2 else 1.0,
            ),
        )
        for i in range(NUM_REQUESTS)
    )


@cache
def undisturbed() -> tuple[DynamicInferenceRequest, ...]:
    return tuple(generate_all(tiny_engine(model()), jobs()))


def over_the_wire(record: DynamicInferenceRequestRecord) -> DynamicInferenceRequestRecord:
    return DynamicInferenceRequestRecord.deserialize(
        msgpack.unpackb(msgpack.packb(record.serialize()), strict_map_key=False)
    )


def begun(num_steps: int, version: int = 0) -> DynamicInferenceEngine:
    engine = tiny_engine(model(), weights_version=version)
    for i, (prompt, params) in enumerate(jobs()):
        engine.add_request(prompt, params, request_id=i)
    for _ in range(num_steps):
        engine.step()
    return engine


@pytest.mark.parametrize("num_steps", [0, 1, 3, 10])
def test_tokens_and_logprobs_are_those_of_an_undisturbed_run(num_steps: int) -> None:
    first, second = begun(num_steps), tiny_engine(model(), num_blocks=24, weights_version=4)
    moved = [i for i in range(NUM_REQUESTS) if i in first.request_ids()]
    before = {}
    for i in moved:
        record = over_the_wire(first.get_record(i))
        before[i] = len(record.current.generated_tokens)
        assert second.add_record(record) == i
    finished, margins = drain(second), Margins()
    assert sorted(finished) == moved
    for i, request in finished.items():
        reference = undisturbed()[i]
        assert request.finish_reason == reference.finish_reason
        if not margins.compare(model(), request, reference.generated_tokens):
            continue
        assert_allclose(request.generated_log_probs, reference.generated_log_probs, atol=1e-4)
        assert request.generated_ranks == reference.generated_ranks
        if reference.prompt_log_probs is not None:
            assert_allclose(request.prompt_log_probs, reference.prompt_log_probs, atol=1e-4)
        num_prompt, num_before = len(request.prompt_tokens), before[i]
        assert request.policy_versions.tolist() == [0] * num_before + [4] * (
            len(request.generated_tokens) - num_before
        )
        assert request.kv_cache_staleness.tolist() == [0] * (
            num_prompt + len(request.generated_tokens)
        )
        assert len(request.tpot) == len(request.generated_tokens)
    margins.check()


def test_a_moved_request_may_move_again() -> None:
    """After every second token, to a new engine."""
    engines, (prompt, params) = [tiny_engine(model())], jobs()[1]
    engines[0].add_request(prompt, params, request_id=7)
    while engines[-1].has_unfinished_requests():
        records = [record for _ in range(2) for record in engines[-1].step()]
        if records:
            break
        engines.append(tiny_engine(model(), weights_version=len(engines)))
        engines[-1].add_record(over_the_wire(engines[-2].get_record(7)))
    request, reference = records[0].merge(), undisturbed()[1]
    assert request.generated_tokens == reference.generated_tokens
    assert len(engines) == -(-len(reference.generated_tokens) // 2)
    assert request.policy_versions.tolist() == [
        k // 2 for k in range(len(reference.generated_tokens))
    ]


def test_add_record_refuses_a_record_that_cannot_continue() -> None:
    engine = begun(3)
    running = engine.get_record(max(i for i in range(NUM_REQUESTS) if i in engine.request_ids()))
    with pytest.raises(InvalidRequestError, match="in use"):
        engine.add_record(running)
    ended = engine.abort_request(running.request_id)
    with pytest.raises(InvalidRequestError, match="has ended"):
        engine.add_record(ended)
    other = tiny_engine(model(), max_sequence_length=16)
    long = next(
        i for i, (prompt, _) in enumerate(jobs()) if len(prompt) == 30 and i in engine.request_ids()
    )
    record = over_the_wire(engine.get_record(long))
    other.add_record(record)
    (failed,) = drain(other).values()
    assert failed.failed()
    assert len(failed.generated_tokens) == 3
    small = tiny_engine(tiny_model("qwen3", vocab_size=100))
    with pytest.raises(InvalidRequestError, match=r"vocabulary"):
        small.add_record(record)
    request = DynamicInferenceRequest(
        request_id=4,
        prompt_tokens=torch.tensor([1, 2]),
        sampling_params=SamplingParams(num_tokens_to_generate=3, stop_token_ids=[200]),
        seed=1,
    )
    with pytest.raises(InvalidRequestError, match="stop_token_ids names the id 200"):
        small.add_record(DynamicInferenceRequestRecord.from_request(request))
    assert not small.has_unfinished_requests()
    nobody = DynamicInferenceRequestRecord.from_request(
        DynamicInferenceRequest(request_id=3, prompt_tokens=record[0].prompt_tokens)
    )
    with pytest.raises(InvalidRequestError, match="no sampling params or no seed"):
        other.add_record(nobody)
    other.shutdown()
    with pytest.raises(EngineStateError, match="add a request"):
        other.add_record(record)
