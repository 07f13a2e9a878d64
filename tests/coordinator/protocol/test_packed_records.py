"""Packed records arrive unchanged; their values per token are arrays until they are read."""

from __future__ import annotations

import tracemalloc
from array import array

import msgpack
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout import (
    DynamicInferenceRequest,
    DynamicInferenceRequestRecord,
    ProtocolError,
    SamplingParams,
    Status,
)
from rollout.coordinator.protocol.packed import pack_record, unpack_record
from rollout.generated_text import add_text
from rollout.requests import DynamicInferenceEvent, DynamicInferenceEventType
from rollout.requests.columns import ARRAY_FIELDS
from rollout.version_spans import VersionSpans

doubles = st.floats(allow_nan=True)
singles = st.floats(width=32, allow_nan=True)
ids = st.integers(0, 2**31 - 1)


def values(element, size, typecode):
    """Per token: none asked for, or a list, or what an engine appends to."""
    some = st.lists(element, min_size=size, max_size=size)
    return st.none() | some | some.map(lambda numbers: array(typecode, numbers))


@st.composite
def segments(draw, request_id=5):
    size = draw(st.integers(0, 5))
    tokens = draw(st.lists(ids, min_size=size, max_size=size))
    request = DynamicInferenceRequest(
        request_id=request_id,
        prompt_tokens=draw(st.lists(ids, min_size=1, max_size=4)),
        sampling_params=SamplingParams(num_tokens_to_generate=10),  # more than all segments have
        status=draw(st.sampled_from(Status)),
        generated_top_n_logprobs=draw(st.none() | st.lists(st.none() | st.just({3: -0.5}))),
        weights_version=3,
    )
    request.generated_tokens = draw(st.sampled_from([tokens, array("i", tokens)]))
    request.generated_log_probs = draw(values(singles, size, "f"))
    request.generated_ranks = draw(values(st.integers(0, 200_000), size, "i"))
    request.prompt_log_probs = draw(values(singles, draw(st.integers(0, 3)), "f"))
    request.tpot = draw(values(doubles, size, "d"))
    request.policy_spans.append(size, 4)
    request.kv_spans = VersionSpans([(max(0, request.num_tokens - 1), 4)])
    if draw(st.booleans()):
        request.complete()
    if draw(st.booleans()):
        request.add_event_generated_token(7)
    return request


ENTRY = DynamicInferenceEvent(type=DynamicInferenceEventType.ADD_ENGINE, timestamp=3.0)


@st.composite
def records(draw):
    record = DynamicInferenceRequestRecord.from_request(draw(segments()))
    for _ in range(draw(st.integers(0, 2))):
        record.checkpoint()
        count = draw(st.integers(0, 2))
        record.current.generated_tokens = array("i", range(count))
        record.current.policy_spans.append(count, 5)
    record.latency = draw(st.none() | st.floats(0, 9))
    return record


def form(record: DynamicInferenceRequestRecord) -> bytes:
    """All of a record, in bytes: NaN is equal to itself there."""
    return msgpack.packb(record.copy().serialize())


@settings(deadline=None)
@given(records())
def test_packed_records_are_unpacked_unchanged(record):
    arrived = unpack_record(pack_record(record.copy()))
    assert form(arrived) == form(record)
    assert pack_record(unpack_record(pack_record(arrived))) == pack_record(arrived)


@settings(deadline=None)
@given(records())
def test_columns_read_late_equal_columns_read_at_once(record):
    late = unpack_record(pack_record(record.copy()))
    once = DynamicInferenceRequestRecord.deserialize(record.copy().serialize())
    assert form(late) == form(once)
    late = unpack_record(pack_record(record.copy()))
    assert merged_form(late) == merged_form(once)
    for held in (late, once):
        held.observe_version(6)
        if held.current.generated_tokens is not None:
            held.current.event_add_engine = ENTRY  # else the checkpoint makes one of its time
            held.checkpoint()
    assert form(late) == form(once)


def merged_form(record: DynamicInferenceRequestRecord) -> bytes:
    return msgpack.packb(record.merge().serialize())


def test_lists_are_made_when_they_are_read():
    record = DynamicInferenceRequestRecord.from_request(
        DynamicInferenceRequest(
            request_id=1, prompt_tokens=torch.arange(3), generated_log_probs=[-0.5, -0.25]
        )
    )
    record.current.generated_tokens = array("i", [4, 5])
    arrived = unpack_record(pack_record(record))
    copied, merged = arrived.copy(), arrived.merge()
    for request in (arrived.current, copied.current, merged):
        assert "generated_tokens" not in vars(request)
        assert request.generated_tokens == [4, 5]
        assert isinstance(vars(request)["generated_tokens"], list)
    assert arrived.current.generated_log_probs == [-0.5, -0.25]


@pytest.mark.parametrize(
    "columns",
    [
        {"generated_tokens": ["<i4", b"123"]},
        {"generated_tokens": ["<i2", b"12"]},
        {"generated_tokens": ["<i4", [1]]},
        {"prompt": ["<i4", b"1234"]},
        {name: ["<f8", b""] for name in (*ARRAY_FIELDS, "more")},
    ],
)
def test_columns_that_are_none_are_refused(columns):
    with pytest.raises(ProtocolError, match="not a record"):
        unpack_record(msgpack.packb([None, [[{"request_id": 1}, columns]]]))
    good = msgpack.packb([None, [[{"request_id": 1}, {"tpot": ["<f8", bytes(8)]}]]])
    assert unpack_record(good).current.tpot == [0.0]


def test_a_record_that_gets_no_text_is_not_read_for_it():
    """A client without a tokenizer makes no lists of the replies that pass it."""
    request = DynamicInferenceRequest(request_id=5, prompt_tokens=[1])
    request.generated_tokens = array("i", [4, 5, 6])
    sent = DynamicInferenceRequestRecord.from_request(request)
    arrived = unpack_record(pack_record(sent))
    add_text(arrived, None)
    assert not isinstance(arrived.current.column("generated_tokens"), list)
    assert arrived.current.generated_tokens == [4, 5, 6]


# ---- what a record may cost


@pytest.mark.parametrize("num_segments", [1, 100])
def test_a_record_of_plain_values_that_cost_far_more_than_their_bytes_is_not_built(num_segments):
    """An empty list is one byte, and 64 in memory."""
    num_items = 5 * 2**20 // num_segments
    lists = b"\xdd" + num_items.to_bytes(4, "big") + b"\x90" * num_items
    fields = b"\x82\xaarequest_id\x01\xa8segments" + lists
    segments = (b"\x92" + fields + b"\x80") * num_segments
    packed = b"\x92\xc0\xdc" + num_segments.to_bytes(2, "big") + segments
    tracemalloc.start()
    try:
        with pytest.raises(ProtocolError, match="bytes of plain values, such as events; at most"):
            unpack_record(packed)
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()


def test_a_record_with_more_events_than_are_read_is_refused_where_it_is_packed():
    request = DynamicInferenceRequest(request_id=1, prompt_tokens=[1], prompt="a" * 5 * 2**20)
    with pytest.raises(ProtocolError, match="bytes of plain values, such as events; at most"):
        pack_record(DynamicInferenceRequestRecord.from_request(request))


def test_a_long_context_with_all_its_log_probs_is_a_record():
    """Its tensors and dictionaries are more than the plain values that are allowed."""
    request = DynamicInferenceRequest(
        request_id=1,
        prompt_tokens=torch.arange(2**19 + 1),
        generated_top_n_logprobs=[{k: -k / 8 for k in range(20)}] * 2**14,
    )
    request.generated_tokens = array("i", range(2**14))
    packed = pack_record(DynamicInferenceRequestRecord.from_request(request))
    arrived = unpack_record(packed).current
    assert arrived.prompt_tokens.equal(request.prompt_tokens)
    assert arrived.generated_top_n_logprobs == request.generated_top_n_logprobs
