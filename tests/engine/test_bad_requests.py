"""Malformed and impossible requests get a clear error and disturb no other request."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from rollout import (
    BlockOverflowError,
    DynamicInferenceEngine,
    DynamicInferenceEventType,
    DynamicInferenceRequestRecord,
    EngineStateError,
    InvalidRequestError,
    MaxSequenceLengthOverflowError,
    SamplingParams,
    Status,
    TokenLimitClamped,
    TokenOverflowError,
)
from rollout.requests.dynamic_request import DynamicVLMInferenceRequest
from rollout.sampling_params import MAX_TEMPERATURE, MIN_TEMPERATURE
from tests.tiny_models import MAX_LENGTH, VOCAB_SIZE, drain, prompt_of, tiny_engine, tiny_model

GOOD = SamplingParams(num_tokens_to_generate=12, seed=1)


@cache
def model() -> Any:
    return tiny_model()


def with_others(**config: Any) -> DynamicInferenceEngine:
    """An engine with one request running and one queued, ids 0 and 1."""
    engine = tiny_engine(model(), **({"max_requests": 1} | config))
    for i in (0, 1):
        engine.add_request(prompt_of(10, seed=i), GOOD)
    engine.step()
    return engine


@cache
def undisturbed() -> tuple[list[int], list[int]]:
    finished = drain(with_others())
    return finished[0].generated_tokens, finished[1].generated_tokens


def assert_others_unharmed(engine: DynamicInferenceEngine) -> None:
    finished = drain(engine)
    assert (finished[0].generated_tokens, finished[1].generated_tokens) == undisturbed()
    assert engine.stats().num_blocks_used == 0


MALFORMED: dict[str, tuple[Any, dict[str, Any], str]] = {
    "empty": ([], {}, "empty"),
    "empty tensor": (torch.empty(0, dtype=torch.int64), {}, "empty"),
    "too large an id": ([3, VOCAB_SIZE], {}, rf"{VOCAB_SIZE} .*\[0, {VOCAB_SIZE}\)"),
    "negative id": ([3, -7], {}, "-7"),
    "no list": (5, {}, "5"),
    "None": (None, {}, "None"),
    "nested": ([[1, 2]], {}, r"\[1, 2\]"),
    "images": ({"prompt": [1], "multi_modal_data": {}}, {}, "dict.*images are not supported"),
    "floats": ([1.0, 2.0], {}, "1.0"),
    "float tensor": (torch.ones(3), {}, "1.0"),
    "bools": ([True, False], {}, "True"),
    "mixed": ([1, "a"], {}, "'a'"),
    "text": ("hello", {}, "'hello'.*tokenizer"),
    "total": ([1, 2, 3], {"num_tokens_total": 3}, "num_tokens_total=3"),
    "at least": (
        [1, 2, 3],
        {"num_tokens_total": 7, "min_tokens": 5},
        "min_tokens=5 .*num_tokens_total=7 .*prompt of 3",
    ),
    "stop words": ([1], {"stop_words": ["x"]}, r"\('x',\).*tokenizer"),
    "BOS": ([1], {"add_BOS": True}, "add_BOS=True"),
    "stop id": ([1], {"stop_token_ids": [VOCAB_SIZE]}, f"stop_token_ids.* {VOCAB_SIZE}"),
    "allowed": ([1], {"allowed_token_ids": [2, VOCAB_SIZE]}, f"allowed_token_ids.* {VOCAB_SIZE}"),
    "bias": ([1], {"logit_bias": {VOCAB_SIZE: 1.0}}, f"logit_bias.* {VOCAB_SIZE}"),
    "only ends": (
        [1],
        {"allowed_token_ids": [3], "stop_token_ids": [3, 4], "min_tokens": 1},
        "min_tokens=1",
    ),
    "top-n": ([1], {"top_n_logprobs": VOCAB_SIZE + 1}, f"top_n_logprobs={VOCAB_SIZE + 1}"),
}


@pytest.mark.parametrize("case", MALFORMED)
def test_add_request_with_a_malformed_request_raises_and_queues_nothing(case: str) -> None:
    prompt, changes, message = MALFORMED[case]
    engine = with_others()
    before = engine.stats()
    with pytest.raises(InvalidRequestError, match=message):
        engine.add_request(prompt, SamplingParams(**changes))
    with pytest.raises(InvalidRequestError, match=message):
        engine.add_group(prompt, [SamplingParams(**changes)] * 3)
    assert engine.stats() == before
    assert_others_unharmed(engine)


@pytest.mark.parametrize(
    "arguments",
    [
        {"request_id": "a"},
        {"request_id": 1.5},
        {"request_id": True},
        {"request_id": [1]},
        {"priority": "high"},
        {"priority": None},
        {"sampling_params": {"temperature": 1.0}},
        {"sampling_params": None},
    ],
)
def test_add_request_refuses_arguments_of_wrong_types(
    arguments: dict[str, Any],
) -> None:
    engine = with_others()
    with pytest.raises(InvalidRequestError):
        engine.add_request(**({"prompt_tokens": [1], "sampling_params": GOOD} | arguments))
    assert_others_unharmed(engine)


def test_a_request_id_in_use_is_refused_until_its_record_is_returned() -> None:
    engine = with_others()
    impossible = engine.add_request(prompt_of(MAX_LENGTH), GOOD, request_id=70)
    for request_id in (0, 1, impossible):
        with pytest.raises(InvalidRequestError, match=f"request id {request_id} is in use"):
            engine.add_request([1], GOOD, request_id=request_id)
    with pytest.raises(InvalidRequestError, match=r"\[5, 5\]"):
        engine.add_group([1], [GOOD] * 2, request_ids=[5, 5])
    with pytest.raises(InvalidRequestError, match=r"\[5\] must be 2"):
        engine.add_group([1], [GOOD] * 2, request_ids=[5])
    with pytest.raises(InvalidRequestError, match="at least one"):
        engine.add_group([1], [])
    assert_others_unharmed(engine)
    assert engine.add_request([1], GOOD, request_id=0) == 0
    assert engine.add_request([1], GOOD) == 71


def test_add_groups_refuses_request_ids_that_do_not_fit_its_samples() -> None:
    engine = with_others()
    groups = [([1, 2], [GOOD] * 2), ([3], [GOOD])]
    bad: list[list[Any]] = [
        [7],
        [7, 8],
        [7, 8, 7],
        [7, 8, 1],
        [7, 8, "9"],
        [7, 8, [9]],
        [7, 8, 9, 10],
    ]
    for ids in bad:
        with pytest.raises(InvalidRequestError, match=r"request.id"):
            engine.add_groups(groups, ids)
    with pytest.raises(InvalidRequestError, match="priority='high'"):
        engine.add_groups(groups, [7, 8, 9], priority="high")  # type: ignore[arg-type]
    assert engine.stats().num_waiting == 1
    assert engine.add_groups(groups, [9, 7, 8]) == [[9, 7], [8]]
    assert engine.add_groups(groups) == [[10, 11], [12]]
    assert_others_unharmed(engine)


def test_add_group_with_one_bad_sample_queues_none() -> None:
    engine = with_others()
    with pytest.raises(InvalidRequestError, match="num_tokens_total=1"):
        engine.add_group([1, 2], [GOOD, SamplingParams(num_tokens_total=1)])
    with pytest.raises(InvalidRequestError, match="empty"):
        engine.add_groups([([1, 2], [GOOD]), ([], [GOOD])])
    assert engine.stats().num_waiting == 1
    assert_others_unharmed(engine)


IMPOSSIBLE: dict[str, tuple[int, dict[str, Any], type[Exception], str]] = {
    "too long": (MAX_LENGTH, {}, MaxSequenceLengthOverflowError, f"{MAX_LENGTH}"),
    "pool": (97, {"num_blocks": 12}, BlockOverflowError, "97 tokens .*96.*buffer_size_gb"),
    "step": (
        65,
        {"max_tokens": 64, "enable_chunked_prefill": False},
        TokenOverflowError,
        "65 .*64.*enable_chunked_prefill",
    ),
}


@pytest.mark.parametrize("case", IMPOSSIBLE)
def test_a_request_that_can_never_run_is_returned_failed_by_the_next_step(case: str) -> None:
    length, config, error_type, message = IMPOSSIBLE[case]
    engine = with_others(**config)
    request_id = engine.add_request(prompt_of(length), GOOD)
    assert engine.get_record(request_id).current.status is Status.FAILED
    (record,) = engine.step()
    request = record.merge()
    assert (request.request_id, request.status) == (request_id, Status.FAILED)
    assert request.finish_reason == "error"
    added, error, failed = request.events
    assert [added.type.name, failed.type.name] == ["ADD_ENGINE", "FAIL"]
    assert error.type is DynamicInferenceEventType.ERROR_NONTRANSIENT
    assert isinstance(error.payload, error_type)
    assert not error.payload.is_transient
    with pytest.raises(error_type, match=message):
        raise error.payload
    with pytest.raises(EngineStateError, match=str(request_id)):
        engine.get_record(request_id)
    assert engine.stats().num_failed == 1
    assert_others_unharmed(engine)


def test_add_record_refuses_a_request_with_images() -> None:
    with_images = DynamicVLMInferenceRequest(
        request_id=70,
        prompt_tokens=torch.arange(4),
        sampling_params=GOOD,
        seed=0,
        num_img_embeddings_per_tile=1,
        imgs=torch.zeros(1),
        num_tiles=torch.ones(1),
        decoder_seq_length=4,
    )
    engine = with_others()
    with pytest.raises(InvalidRequestError, match="request 70 has images"):
        engine.add_record(DynamicInferenceRequestRecord.from_request(with_images))
    with pytest.raises(InvalidRequestError, match="DynamicVLMInferenceRequest"):
        engine.add_request(with_images, GOOD)  # type: ignore[arg-type]
    assert_others_unharmed(engine)


@pytest.mark.parametrize("temperature", [MIN_TEMPERATURE, MAX_TEMPERATURE])
def test_the_extreme_temperatures_give_finite_log_probs(temperature: float) -> None:
    params = SamplingParams(
        num_tokens_to_generate=3,
        temperature=temperature,
        top_p=0.9,
        min_p=0.1,
        return_log_probs=True,
        logprobs_mode="temperature",
        seed=1,
    )
    engine = tiny_engine(model())
    request_id = engine.add_request(prompt_of(9), params)
    assert drain(engine)[request_id].generated_log_probs.isfinite().all()


def test_a_prompt_that_just_fits_completes() -> None:
    engine = tiny_engine(model(), num_blocks=12)
    ids = [
        engine.add_request(prompt_of(96), SamplingParams(num_tokens_to_generate=1)),
        engine.add_request(prompt_of(50), SamplingParams(num_tokens_to_generate=47)),
    ]
    finished = drain(engine)
    assert [finished[i].generated_length for i in ids] == [1, 47]
    engine = tiny_engine(model())
    request_id = engine.add_request(prompt_of(MAX_LENGTH - 1), SamplingParams())
    assert drain(engine)[request_id].generated_length == 1


@pytest.mark.parametrize("wanted", [{"num_tokens_to_generate": 90}, {"num_tokens_total": 101}])
def test_token_limits_beyond_the_engine_are_clamped_with_a_transient_event(
    wanted: dict[str, int],
) -> None:
    engine = tiny_engine(model(), num_blocks=12)
    params = SamplingParams(seed=1, **wanted)
    request_id = engine.add_request(prompt_of(11), params)
    request = drain(engine)[request_id]
    assert request.status is Status.COMPLETED
    assert request.generated_length == 96 + 1 - 11
    (error,) = [e for e in request.events if e.type.name == "ERROR_TRANSIENT"]
    assert isinstance(error.payload, TokenLimitClamped)
    assert "90" in error.payload.message
    assert "86" in error.payload.message
    assert request.sampling_params == params


def test_without_a_limit_a_request_runs_to_the_longest_sequence() -> None:
    engine = tiny_engine(model(), max_sequence_length=40)
    request_id = engine.add_request(prompt_of(11), SamplingParams())
    request = drain(engine)[request_id]
    assert request.generated_length == 29
    assert not [event for event in request.events if event.type.name.startswith("ERROR")]


def test_prompts_may_be_lists_tuples_ranges_arrays_and_tensors() -> None:
    engine = tiny_engine(model())
    forms = [
        [4, 5, 6],
        (4, 5, 6),
        range(4, 7),
        np.array([4, 5, 6], dtype=np.int32),
        list(np.array([4, 5, 6])),
        torch.tensor([4, 5, 6]),
    ]
    ids = [engine.add_request(prompt, GOOD) for prompt in forms]
    finished = drain(engine)
    assert len({tuple(finished[i].generated_tokens) for i in ids}) == 1


def test_the_callers_prompt_and_params_are_not_changed() -> None:
    prompt, params = [4, 5, 6], SamplingParams(num_tokens_to_generate=90)
    tensor = torch.tensor(prompt)
    engine = tiny_engine(model(), num_blocks=4)
    engine.add_request(prompt, params)
    request_id = engine.add_request(tensor, params)
    request = drain(engine)[request_id]
    assert prompt == tensor.tolist() == [4, 5, 6]
    request.prompt_tokens[0] = 0
    assert tensor.tolist() == [4, 5, 6]
    assert params == SamplingParams(num_tokens_to_generate=90)


def test_abort_request_and_get_record_refuse_unknown_ids() -> None:
    engine = with_others()
    for act in (engine.abort_request, engine.get_record):
        with pytest.raises(EngineStateError, match="request 99"):
            act(99)
    assert_others_unharmed(engine)
    with pytest.raises(EngineStateError, match="request 0"):
        engine.abort_request(0)
