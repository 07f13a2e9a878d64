"""Requests as data: construction, metadata, events, encoding."""

from __future__ import annotations

import msgpack
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rollout.errors import (
    BlockOverflowError,
    InvalidRequestError,
    ProtocolError,
    RequestAbortedError,
)
from rollout.requests import (
    DynamicInferenceEventType,
    DynamicInferenceRequest,
    InferenceRequest,
    Status,
    VLMInferenceRequest,
)
from rollout.sampling_params import SamplingParams
from rollout.version_spans import VersionSpans

token_lists = st.lists(st.integers(0, 200_000), max_size=12)
log_probs = st.lists(st.floats(-50, 0, width=32), max_size=12)
spans = st.builds(VersionSpans, st.lists(st.tuples(st.integers(1, 4), st.integers(0, 9))))
requests_strategy = st.builds(
    DynamicInferenceRequest,
    request_id=st.integers(0, 2**40),
    prompt=st.none() | st.text(),
    prompt_tokens=token_lists,
    generated_tokens=token_lists,
    sampling_params=st.none() | st.builds(SamplingParams, temperature=st.floats(0.01, 2)),
    arrival_time=st.none() | st.floats(0, 1e9),
    status=st.none() | st.sampled_from(Status),
    finish_reason=st.none() | st.sampled_from(["stop", "length", "abort", "error"]),
    stop_reason=st.none() | st.integers(0, 200_000) | st.text(),
    generated_log_probs=st.none() | log_probs | log_probs.map(torch.tensor),
    generated_ranks=st.none() | st.lists(st.integers(0, 200_000), max_size=4),
    prompt_log_probs=st.none() | log_probs.map(torch.tensor),
    generated_top_n_logprobs=st.none()
    | st.lists(st.none() | st.dictionaries(st.integers(0, 99), st.floats(-50, 0)), max_size=4),
    tpot=st.none() | st.lists(st.floats(0, 10), max_size=4),
    priority=st.integers(-5, 5),
    seed=st.none() | st.integers(0, 2**64 - 1),
    stop_word_ids=st.none() | st.lists(token_lists, max_size=3),
    routing_indices=st.none() | st.just(torch.arange(12, dtype=torch.int16).reshape(3, 2, 2)),
    block_size_tokens=st.none() | st.integers(1, 8),
    enable_prefix_caching=st.booleans(),
    weights_version=st.integers(0, 9),
    completed_at_version=st.none() | st.integers(0, 9),
    policy_clock=st.none() | st.integers(0, 9),
    kv_spans=spans,
    kv_versions_are_bounds=st.booleans(),
    context_kv_version_min=st.lists(st.integers(0, 9), max_size=4),
    context_kv_version_mean=st.lists(st.floats(0, 9), max_size=4),
)


def travel(request):
    """Return `request` as another process receives it."""
    return type(request).deserialize(msgpack.unpackb(msgpack.packb(request.serialize())))


@given(requests_strategy)
def test_every_field_survives_the_wire(request):
    restored = travel(request)
    assert restored.serialize() == request.serialize()
    assert restored.status is request.status
    assert restored.sampling_params == request.sampling_params
    assert restored.policy_spans == request.policy_spans
    assert restored.kv_spans == request.kv_spans
    assert restored.generated_top_n_logprobs == request.generated_top_n_logprobs


def test_tensors_keep_dtype_and_shape_over_the_wire():
    routing = torch.arange(8, dtype=torch.int16).reshape(2, 2, 2)
    request = DynamicInferenceRequest(
        request_id=1, prompt_tokens=[1, 2], routing_indices=routing, generated_log_probs=[-0.5]
    )
    restored = travel(request)
    assert restored.prompt_tokens.dtype == torch.int64
    assert restored.routing_indices.dtype == torch.int16
    assert torch.equal(restored.routing_indices, routing)
    assert restored.generated_log_probs == [-0.5]


def test_static_request_survives_the_wire():
    request = InferenceRequest(
        request_id=1, prompt="a", prompt_tokens=[1], generated_tokens=torch.tensor([2])
    )
    restored = travel(request)
    assert restored.prompt_tokens == [1]
    assert torch.equal(restored.generated_tokens, torch.tensor([2]))


def test_images_survive_the_wire():
    request = VLMInferenceRequest(
        request_id=1,
        num_img_embeddings_per_tile=16,
        imgs=torch.rand(1, 3, 2, 2, dtype=torch.float16),
        num_tiles=torch.tensor([1]),
        decoder_seq_length=64,
    )
    restored = travel(request)
    assert torch.equal(restored.imgs, request.imgs)
    assert (restored.num_img_embeddings_per_tile, restored.decoder_seq_length) == (16, 64)


def test_events_survive_the_wire_without_the_shortcut_to_the_first():
    request = DynamicInferenceRequest(request_id=1)
    request.add_event_add_engine()
    request.add_event_generated_token(5, blocks_total=9)
    request.add_event_error_transient(BlockOverflowError(1, "full"))
    assert "event_add_engine" not in request.serialize()
    restored = travel(request)
    assert restored.event_add_engine is None
    assert [event.type for event in restored.events] == [event.type for event in request.events]
    assert restored.events[1].payload == {"token_id": 5, "blocks_total": 9}
    assert type(restored.events[2].payload) is BlockOverflowError


@pytest.mark.parametrize(
    "obj",
    [
        {"request_id": 1, "colour": "red"},
        {"prompt": "x"},
        {"request_id": 1, "status": "NAPPING"},
        {"request_id": 1, "policy_spans": [1]},
        {"request_id": 1, "routing_indices": {"dtype": "int8", "shape": ["x"], "data": b""}},
    ],
)
def test_malformed_request_on_the_wire_raises_protocol_error(obj):
    with pytest.raises(ProtocolError):
        DynamicInferenceRequest.deserialize(obj)


def test_illegal_params_on_the_wire_raise_their_own_error():
    with pytest.raises(InvalidRequestError, match="temperature=-1"):
        DynamicInferenceRequest.deserialize(
            {"request_id": 1, "sampling_params": {"temperature": -1}}
        )


def test_prompt_becomes_an_int64_tensor():
    assert DynamicInferenceRequest(request_id=1, prompt_tokens=[1, 2]).prompt_tokens.dtype == (
        torch.int64
    )
    assert len(DynamicInferenceRequest(request_id=1).prompt_tokens) == 0


def test_prompt_of_two_dimensions_is_refused():
    with pytest.raises(InvalidRequestError, match=r"shape \[1, 2\]"):
        DynamicInferenceRequest(request_id=1, prompt_tokens=[[1, 2]])


def test_former_name_of_the_params_is_understood():
    params = SamplingParams(temperature=0.5)
    assert InferenceRequest(request_id=1, inference_parameters=params).sampling_params is params


def test_remaining_prompt_shrinks_with_the_chunks():
    request = DynamicInferenceRequest(request_id=1, prompt_tokens=[1, 2, 3, 4, 5])
    assert request.remaining_prompt_length == 5
    request.finished_chunk_token_count = 3
    assert request.remaining_prompt_tokens.tolist() == [4, 5]
    assert request.remaining_prompt_length == 2


def test_block_hashes_are_made_only_for_prefix_caching():
    def hashes(**settings):
        tokens = torch.arange(10)
        request = DynamicInferenceRequest(request_id=1, prompt_tokens=tokens, **settings)
        return request.precomputed_block_hashes

    assert hashes(enable_prefix_caching=True, block_size_tokens=4) == [91327, 3045600]
    assert hashes(enable_prefix_caching=True, block_size_tokens=16) == []
    assert hashes(enable_prefix_caching=True) == []
    assert hashes(block_size_tokens=4) == []


def test_given_block_hashes_are_kept():
    request = DynamicInferenceRequest(
        request_id=1,
        prompt_tokens=torch.arange(10),
        enable_prefix_caching=True,
        block_size_tokens=4,
        precomputed_block_hashes=[7, 8],
    )
    assert request.precomputed_block_hashes == [7, 8]


def test_metadata_has_one_value_per_name_that_its_dtype_can_hold():
    params = SamplingParams(temperature=0.5, top_k=3, top_n_logprobs=2)
    request = DynamicInferenceRequest(request_id=1, sampling_params=params)
    names = [name for name, _, _ in request.get_metadata_types()]
    metadata = dict(zip(names, request.tracked_metadata, strict=True))
    assert metadata["temperature"] == 0.5
    assert metadata["top_k"] == 3
    assert metadata["top_n_logprobs"] == 2
    assert metadata["termination_id"] == -1
    for (name, dtype, _), value in zip(
        request.get_metadata_types(), request.tracked_metadata, strict=True
    ):
        assert torch.tensor(value, dtype=dtype).item() == metadata[name]


def test_request_enters_the_engine_only_once():
    request = DynamicInferenceRequest(request_id=1)
    first = request.add_event_add_engine()
    assert request.add_event_add_engine() is first
    assert request.event_add_engine is first
    assert request.events == [first]


def test_each_method_adds_its_event():
    request = DynamicInferenceRequest(request_id=1)
    request.add_event_add_engine()
    request.add_event_add_context()
    request.add_event_generated_token(
        3, blocks_total=9, blocks_hashed_total=4, blocks_hashed_active=2, blocks_ref_count=5
    )
    request.add_event_pause()
    request.add_event_evict()
    request.add_event_error_transient(BlockOverflowError(1))
    request.add_event_error_nontransient(RequestAbortedError("by user"))
    request.add_event_fail()
    request.add_event_finish()
    assert [event.type.name for event in request.events] == [
        "ADD_ENGINE",
        "ADD_CONTEXT",
        "GENERATED_TOKEN",
        "PAUSE",
        "EVICT",
        "ERROR_TRANSIENT",
        "ERROR_NONTRANSIENT",
        "FAIL",
        "FINISH",
    ]
    assert request.events[2].payload == {
        "token_id": 3,
        "blocks_total": 9,
        "blocks_hashed_total": 4,
        "blocks_hashed_active": 2,
        "blocks_ref_count": 5,
    }


def test_add_event_returns_the_event_it_appends():
    request = DynamicInferenceRequest(request_id=1)
    event = request.add_event(DynamicInferenceEventType.PAUSE)
    assert request.events == [event]


@pytest.mark.parametrize("status", Status)
def test_only_the_final_statuses_succeed_or_fail(status):
    request = DynamicInferenceRequest(request_id=1, status=status)
    assert request.succeeded() is (status is Status.COMPLETED)
    assert request.failed() is (status is Status.FAILED)


def test_request_text_names_id_status_and_lengths():
    request = DynamicInferenceRequest(
        request_id=4, prompt_tokens=[1, 2], generated_tokens=[3], status=Status.COMPLETED
    )
    assert "request_id=4, status=COMPLETED, prompt of 2, generated 1 tokens" in str(request)
