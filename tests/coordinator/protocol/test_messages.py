"""The wire protocol: messages arrive unchanged, and no other bytes are accepted as messages."""

from __future__ import annotations

import os
from pathlib import Path

import msgpack
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from msgspec import structs

from rollout import (
    BlockOverflowError,
    DynamicInferenceRequest,
    DynamicInferenceRequestRecord,
    EngineStateError,
    ProtocolError,
    RolloutError,
    SamplingParams,
    Status,
)
from rollout.control.commands import Command, Pause, SetGenerationEpoch, Suspend
from rollout.coordinator.protocol import messages as wire
from rollout.coordinator.protocol.codec import (
    ProtocolVersionError,
    decode,
    encode,
    failures_of,
    require_valid,
)
from rollout.coordinator.protocol.messages import (
    PROTOCOL_VERSION,
    EngineReply,
    EngineReplyPartial,
    Headers,
    Heartbeat,
    Nack,
    Sample,
    SubmitRequest,
    nack_of,
)
from rollout.coordinator.protocol.packed import (
    pack_params,
    pack_record,
    unpack_params,
    unpack_record,
)
from rollout.errors import InvalidRequestError, RemoteError
from rollout.requests.token_runs import TokenRun, TokenRuns, TopNRun
from rollout.weights import source as weights_source
from tests.coordinator.message_strategies import (
    FROM_CLIENTS,
    FROM_COORDINATORS,
    FROM_ENGINES,
    FROM_UNKNOWN_PEERS,
    TYPES,
    assert_same,
    messages,
    run_of,
    sampling_params,
)

LONG = os.environ.get("ROLLOUT_TEST_LONG") == "1"
EXAMPLES = 300 if LONG else 30
PARTS = [
    wire.Attempt,
    wire.Sample,
    TokenRun,
    TokenRuns,
    TopNRun,
    wire.EngineStatus,
    wire.WireError,
    weights_source.TensorEntry,
    weights_source.WeightsSource,
    weights_source.LoraTerms,
]


def sample(request_id: int = 0, **changes: object) -> Sample:
    packed = pack_params(SamplingParams())
    return Sample(request_id=request_id, sampling_params=packed, **changes)


# ---- what is sent arrives


@pytest.mark.parametrize("message_type", TYPES)
def test_every_message_round_trips(message_type):
    @settings(max_examples=EXAMPLES, deadline=None)
    @given(messages(message_type))
    def round_trips(message):
        frame = encode(message)
        arrived = decode(frame)
        assert_same(arrived, message)
        assert arrived == message
        assert encode(arrived) == frame

    round_trips()


def test_the_strategies_reach_every_header():
    assert {Headers(cls.__struct_config__.tag) for cls in TYPES} == set(Headers) - {Headers.BATCH}


@pytest.mark.parametrize(
    ("command", "fields"),
    [
        (Pause(command_id=7, deadline_s=2.0), [40, 7, 2.0]),
        (Suspend(mode="offload"), [42, 0, None, "offload", ["kv_cache"], False]),
        (SetGenerationEpoch(version=5), [44, 0, None, 5]),
    ],
)
def test_a_command_is_its_header_its_id_its_deadline_and_its_arguments(command, fields):
    frame = encode(command)
    assert msgpack.unpackb(frame) == fields
    assert decode(frame) == command


def test_public_headers_have_the_numbers_of_the_public_interface():
    public = {
        "CONNECT": 0, "CONNECT_ACK": 1, "SUBMIT_REQUEST": 20, "ENGINE_REPLY": 21,
        "ENGINE_REPLY_PARTIAL": 22, "ABORT_REQUEST": 23, "PAUSE": 40, "UNPAUSE": 41,
        "SUSPEND": 42, "RESUME": 43, "SET_GENERATION_EPOCH": 44, "STOP": 45,
        "INCREMENT_STALENESS": 46, "DISCONNECT": 60, "SHUTDOWN": 61,
    }  # fmt: skip
    assert {h.name: int(h) for h in Headers if h < 70} == public


def test_arrays_are_little_endian_binary_and_decoded_as_views():
    ids = np.array([1, 2**31 - 1], dtype=np.int32)
    frame = encode(EngineReplyPartial(request_id=3, tokens=run_of(2, token_ids=ids)))
    assert msgpack.unpackb(frame)[2][2] == b"\x01\0\0\0\xff\xff\xff\x7f"
    token_ids = decode(frame).tokens.token_ids
    assert not token_ids.flags.owndata
    assert not token_ids.flags.writeable


@pytest.mark.parametrize(
    "token_ids",
    [
        [1, 2],
        np.array([1, 2]),
        np.array([1, 9, 2, 9], dtype=np.int32)[::2],
        np.array([1, 2], dtype=">i4"),
        torch.tensor([1, 2]),
    ],
)
def test_any_form_of_integers_is_sent_by_its_values(token_ids):
    arrived = decode(encode(SubmitRequest(samples=(sample(),), prompt_tokens=token_ids)))
    assert arrived.prompt_tokens.dtype == np.int32
    assert arrived.prompt_tokens.tolist() == [1, 2]


@pytest.mark.parametrize(
    "token_ids",
    [
        [2**31],
        np.array([2**32 + 1]),
        [-1],
        [0.5],
        [True],
        [[1]],
        5,
        ["1"],
        np.array([1], dtype=np.uint64) << np.uint64(63),
    ],
)
def test_ids_that_would_wrap_or_are_none_are_refused_by_the_sender(token_ids):
    with pytest.raises(ProtocolError, match=r"SubmitRequest.prompt_tokens: "):
        encode(SubmitRequest(samples=(sample(),), prompt_tokens=token_ids))


@given(sampling_params)
@settings(max_examples=EXAMPLES)
def test_sampling_params_survive_packing(params):
    assert unpack_params(pack_params(params)) == params


def test_a_record_survives_packing():
    request = DynamicInferenceRequest(
        request_id=4,
        prompt_tokens=[1, 2, 3],
        sampling_params=SamplingParams(return_log_probs=True),
        status=Status.COMPLETED,
        generated_tokens=[7, 8],
        generated_log_probs=[-0.5, -0.25],
    )
    record = DynamicInferenceRequestRecord.from_request(request)
    arrived = decode(encode(EngineReply(request_id=4, record=pack_record(record))))
    assert unpack_record(arrived.record).serialize() == record.serialize()


# ---- the page says what is there


def test_the_page_lists_every_message_and_part_with_its_fields():
    page = (Path(__file__).parents[3] / "docs" / "protocol.md").read_text("utf-8")
    rows = [[cell.strip() for cell in line.split("|")] for line in page.splitlines()]
    numbered = {row[1]: (row[2], row[4]) for row in rows if len(row) == 7 and row[1].isdigit()}
    expected = {}
    for header, cls in wire.MESSAGE_TYPES.items():
        expected[str(int(header))] = (cls.__name__, fields_of(cls))
    assert numbered == expected
    parts = {row[1]: row[2] for row in rows if len(row) == 4}
    for cls in PARTS:
        assert parts[cls.__name__] == fields_of(cls)


def fields_of(cls: type) -> str:
    return ", ".join(cls.__struct_fields__)


def test_the_page_gives_each_message_its_senders():
    page = (Path(__file__).parents[3] / "docs" / "protocol.md").read_text("utf-8")
    senders = {"C": FROM_CLIENTS, "E": FROM_ENGINES, "K": FROM_COORDINATORS}
    for header, cls in wire.MESSAGE_TYPES.items():
        (row,) = [line for line in page.splitlines() if line.startswith(f"| {int(header)} |")]
        way = row.split("|")[3].strip()
        stated = set("CEK") if way == "any" else {step[0] for step in way.split(", ")}
        assert stated == {letter for letter, types in senders.items() if cls in types}


def test_the_frames_that_the_page_has_a_client_send_are_messages():
    """In the section on the least that a client does."""
    params, tokens = msgpack.packb({"num_tokens_to_generate": 4}), np.arange(3, dtype="<i4")
    submitted = decode(
        msgpack.packb([20, [[7, 0, params, 5, None]], tokens.tobytes(), 0, None, False])
    )
    assert submitted.prompt_tokens.tolist() == [0, 1, 2]
    assert submitted.samples[0] == Sample(request_id=7, sampling_params=params, seed=5)
    assert unpack_params(params) == SamplingParams(num_tokens_to_generate=4)
    assert decode(msgpack.packb([0, 10, bytes(16), ""])) == wire.Connect(client_id=bytes(16))
    assert decode(msgpack.packb([72, 9, None])) == Heartbeat(sequence=9)
    assert decode(msgpack.packb([76, [[7, 0]]])).attempts == (wire.Attempt(request_id=7),)
    assert decode(msgpack.packb([60, "done"])) == wire.Disconnect(reason="done")


# ---- errors keep their class


@pytest.mark.parametrize(
    "error",
    [
        EngineStateError("cannot suspend while RUNNING"),
        BlockOverflowError(3, "9 blocks", is_transient=False),
        RemoteError("CudaError", "gone", is_transient=True),
    ],
)
def test_a_refusal_raises_the_same_error_at_the_peer(error):
    arrived = decode(encode(nack_of(5, error))).error.to_error()
    assert type(arrived) is type(error)
    assert str(arrived) == str(error)
    assert arrived.is_transient == error.is_transient


def test_an_error_from_outside_the_tree_arrives_as_a_remote_error():
    arrived = decode(encode(nack_of(None, OSError("disk full")))).error.to_error()
    assert type(arrived) is RemoteError
    assert str(arrived) == "OSError: disk full"


def test_a_private_error_arrives_as_its_public_base():
    assert type(nack_of(None, ProtocolVersionError("2")).error.to_error()) is ProtocolError


def test_an_error_type_made_up_by_the_peer_is_no_python_class():
    made_up = wire.WireError(type_name="SystemExit", message="bye")
    arrived = decode(encode(Nack(command_id=1, error=made_up))).error.to_error()
    assert type(arrived) is RemoteError
    assert isinstance(arrived, RolloutError)


# ---- handshakes and roles


@pytest.mark.parametrize("rest", [[], [b"x" * 16, "me"], [1, 2, 3, 4, 5, 6, 7, 8, 9]])
@pytest.mark.parametrize("header", [Headers.CONNECT, Headers.REGISTER])
def test_another_protocol_version_is_recognized_whatever_fields_follow(header, rest):
    frame = msgpack.packb([int(header), PROTOCOL_VERSION + 1, *rest])
    with pytest.raises(ProtocolVersionError, match=f"speaks protocol {PROTOCOL_VERSION + 1}"):
        decode(frame)


def test_decode_of_a_malformed_handshake_is_not_a_version_error():
    for version in (None, "1", True, [2]):
        with pytest.raises(ProtocolError) as caught:
            decode(msgpack.packb([int(Headers.CONNECT), version, b"x" * 16, ""]))
        assert type(caught.value) is ProtocolError


def test_every_message_has_a_sender():
    senders = (FROM_UNKNOWN_PEERS, FROM_CLIENTS, FROM_ENGINES, FROM_COORDINATORS)
    assert set().union(*senders) == set(TYPES)


# ---- fields that depend on each other


def test_a_name_twice_in_a_group_is_refused():
    with pytest.raises(ProtocolError, match="request ids repeat"):
        SubmitRequest(samples=(sample(3), sample(3)), prompt_tokens=[1])


def test_a_group_without_samples_is_refused():
    with pytest.raises(ProtocolError, match=r"SubmitRequest.samples: Expected `array` of length >"):
        require_valid(SubmitRequest(samples=(), prompt_tokens=[1]))


@pytest.mark.parametrize("changes", [{"attempt": 1}, {"resumed": run_of(0)}])
def test_a_client_names_no_attempt_and_brings_no_tokens(changes):
    with pytest.raises(ProtocolError, match="a client's sample is attempt 0"):
        SubmitRequest(samples=(sample(**changes),), prompt_tokens=[1])


def test_resumed_tokens_start_at_the_first():
    with pytest.raises(ProtocolError, match="start at 1"):
        sample(resumed=run_of(2, offset=1))


def test_a_reply_without_record_says_why():
    with pytest.raises(ProtocolError, match="needs an error"):
        EngineReply(request_id=1, is_failed=True)


def test_require_valid_refuses_a_command_without_a_header():
    for command_id in range(2**7):
        with pytest.raises(ProtocolError):
            require_valid(Command(command_id=command_id))


def test_encode_refuses_frames_that_receivers_refuse():
    reply = EngineReply(request_id=1, record=bytes(2000))
    assert len(encode(reply, max_bytes=2100)) <= 2100
    with pytest.raises(ProtocolError, match="at most 1000 are allowed"):
        encode(reply, max_bytes=1000)


def test_require_valid_refuses_more_samples_than_a_message_has():
    samples = tuple(Sample(request_id=i, sampling_params=b"") for i in range(2**16 + 1))
    request = SubmitRequest(samples=samples, prompt_tokens=np.array([1], np.int32))
    with pytest.raises(ProtocolError, match=r"SubmitRequest.samples: Expected `array` of length <"):
        require_valid(request)
    fewer = structs.replace(request, samples=samples[: 2**16])
    assert decode(encode(fewer)) == fewer


def test_plain_values_are_not_sent_beyond_their_bound():
    stats = {str(i): bytes(2**10) for i in range(2**10)}
    with pytest.raises(ProtocolError, match=r"Ack of 10.* bytes, at most 1048576"):
        encode(wire.Ack(command_id=1, result=stats))


def test_a_frame_of_exactly_the_limit_is_read():
    frame = encode(EngineReply(request_id=1, record=bytes(2000)))
    assert decode(frame, max_bytes=len(frame)).record == bytes(2000)
    with pytest.raises(ProtocolError, match="at most"):
        decode(frame, max_bytes=len(frame) - 1)


def test_a_frame_is_read_from_any_buffer():
    assert decode(memoryview(encode(Heartbeat(sequence=4)))) == Heartbeat(sequence=4)


def test_messages_differ_if_any_field_does():
    assert Heartbeat(sequence=1) != Heartbeat(sequence=2)
    assert Heartbeat(sequence=1) != wire.Ack(command_id=1)
    assert run_of(2) == run_of(2)
    assert run_of(2) != run_of(2, policy_versions=np.ones(2, np.int32))


@pytest.mark.parametrize("packed", [b"", b"\xc0", b"\x93\1\2", b"\x81\xa1a\1", bytes(100)])
def test_bytes_that_hold_no_record_or_params_are_refused(packed):
    with pytest.raises(ProtocolError):
        unpack_record(packed)
    with pytest.raises((ProtocolError, InvalidRequestError)):
        unpack_params(packed)


# ---- malformed messages that name what they are about


@pytest.mark.parametrize(
    ("frame", "accepted", "named"),
    [
        ([20, [[7, 0, 5, None, None], [8]], b"", 0, None, 3], SubmitRequest, [(7, 0), (8, 0)]),
        ([75, [[7, 2, 5]], b"123"], wire.AssignRequest, [(7, 2)]),
        ([21, 7, 3, 5, None], EngineReply, [(7, 3)]),
        ([40, 9, -5], Pause, [9]),
        ([70, 9, {"a": {1: 2}}], wire.Ack, [9]),
        ([78, 9, -1, None], wire.Prepare, [9]),
        ([71, None, 5], Nack, []),
        ([40, -9, 5], Pause, []),
        ([20, [[-7]]], SubmitRequest, []),
        ([83, 5], wire.Progress, []),
        ([40, 9, -5], SubmitRequest, []),
    ],
)
def test_failures_of_a_malformed_frame_name_its_requests_or_command(frame, accepted, named):
    packed = msgpack.packb(frame)
    with pytest.raises(ProtocolError) as fault:
        decode(packed)
    failures = failures_of(packed, fault.value, {accepted})
    found = [f.command_id if isinstance(f, Nack) else (f.request_id, f.attempt) for f in failures]
    assert found == named
    assert all(str(f.error.to_error()) == str(fault.value) for f in failures)
    assert not failures_of(packed[:-1], fault.value, {accepted}), "half a frame names nothing"
