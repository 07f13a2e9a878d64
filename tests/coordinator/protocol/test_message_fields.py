"""Each field takes what its annotation says and refuses the rest, by one table."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from rollout import ProtocolError, SamplingParams
from rollout.coordinator.protocol import messages as wire
from rollout.coordinator.protocol.field_codecs import class_codec_of, codec_of, to_fields
from rollout.coordinator.protocol.messages import Headers

DEEP = {"a": [[[[[[[[1]]]]]]]]}  # 9 levels
# What a field may be replaced by, as msgpack hands it over.
VALUES = {
    "none": None,
    "true": True,
    "zero": 0,
    "sixteen": 16,
    "minus one": -1,
    "40": 40,
    "2^31": 2**31,
    "2^63": 2**63,
    "-2^63-1": -(2**63) - 1,  # no msgpack integer: a sender's fault
    "1.5": 1.5,
    "-0.5": -0.5,
    "nan": float("nan"),
    "inf": float("inf"),
    "text": "ab",
    "long text": "a" * 1025,
    "empty text": "",
    "empty bytes": b"",
    "3 bytes": b"abc",
    "16 bytes": bytes(16),
    "-1 in bytes": b"\xff" * 16,
    "empty list": [],
    "list of none": [None],
    "list of 17": [0] * 17,
    "empty map": {},
    "map": {"a": [1, {"b": None}]},
    "bytes keys": {b"a": 1},
    "deep map": DEEP,
    "object": object(),
}
_SMALL = {"zero", "sixteen", "40"}
_COUNT = _SMALL | {"2^31"}
_BYTES = {"empty bytes", "3 bytes", "16 bytes", "-1 in bytes"}
_TEXT = {"text", "long text", "empty text"}
_SHORT = {"text", "empty text"}
_ARRAY = {"empty bytes", "16 bytes", "-1 in bytes"}
_LIST = {"empty list"}
_PLAIN = {"empty map", "map"}
# A one-element or longer array does not fit the examples, whose runs have no tokens.
_NO_TOKENS = {"empty bytes"}
LEGAL = {
    "Headers": {"40"},
    "Count": _COUNT,
    "Count | None": _COUNT | {"none"},
    "Int": _COUNT | {"minus one"},
    "Seed | None": _COUNT | {"minus one", "2^63", "none"},
    "Version": _SMALL | {"minus one"},
    "Version | None": _SMALL | {"minus one", "none"},
    "Seconds": _SMALL | {"1.5"},
    "Seconds | None": _SMALL | {"1.5", "none"},
    "bool": {"true"},
    "Uuid": {"16 bytes", "-1 in bytes"},
    "Name": _SHORT,
    "str | None": _TEXT | {"none"},
    "bytes": _BYTES,
    "bytes | None": _BYTES | {"none"},
    "Tokens": _ARRAY - {"-1 in bytes"},
    "str | Tokens": _TEXT | _ARRAY - {"-1 in bytes"},
    "Versions": _NO_TOKENS,
    "Doubles": _NO_TOKENS,
    "LogProbs": _NO_TOKENS,
    "LogProbs | None": _NO_TOKENS | {"none"},
    "PlainMap": _PLAIN,
    "Samples": set(),
    "tuple[Attempt, ...]": _LIST,
    "tuple[RunningAttempt, ...]": _LIST,
    "Annotated[tuple[Count, ...], Length(0, 16)]": _LIST,
    "Mapping[str, TensorEntry]": {"empty map"},
    "TopNRun.counts": _ARRAY,  # no or absent values at four positions
    "TopNRun.token_ids": _NO_TOKENS,
    "TokenRun.token_ids": _NO_TOKENS,
    "TokenRun": set(),
    "TokenRun | None": {"none"},
    "TopNRun | None": {"none"},
    "WeightsSource": set(),
    "WeightsSource | None": {"none"},
    "WireError": set(),
    "WireError | None": {"none"},
    "EngineStatus | None": {"none"},
}

NO_IDS = np.zeros(0, np.int32)
TOP_N = wire.TopNRun(counts=NO_IDS, token_ids=NO_IDS, log_probs=NO_IDS.astype(np.float32))
RUN = wire.TokenRun(
    offset=0,
    entry_version=0,
    token_ids=NO_IDS,
    policy_versions=NO_IDS,
    context_kv_version_min=NO_IDS,
    context_kv_version_mean=NO_IDS.astype(np.float64),
)
SAMPLE = wire.Sample(request_id=1, sampling_params=wire.pack_params(SamplingParams()))
ERROR = wire.WireError(type_name="ConfigError", message="no")
TENSOR = wire.TensorEntry(dtype="float32", shape=(2, 3), offset=0, num_bytes=24)
SOURCE = wire.WeightsSource(kind="shm", address="w", manifest={"w": TENSOR}, checksum="c")
STATUS = wire.EngineStatus(
    state="running", num_steps=1, num_waiting=0, num_running=1, num_blocks_free=9, weights_version=0
)
SECONDS = {"lease_s": 2.0, "heartbeat_s": 0.5}
EXAMPLES = [
    TOP_N,
    RUN,
    SAMPLE,
    ERROR,
    TENSOR,
    SOURCE,
    STATUS,
    wire.Attempt(request_id=1),
    wire.RunningAttempt(request_id=1, attempt=2, num_tokens=3),
    wire.Connect(client_id=bytes(16)),
    wire.ConnectAck(
        coordinator_id=bytes(16), state="", data_parallel_size=2, weights_version=0, **SECONDS
    ),
    wire.Register(
        engine_id=bytes(16),
        state="running",
        weights_version=0,
        weights_checksum="",
        block_size_tokens=16,
        max_requests=4,
    ),
    wire.RegisterAck(
        coordinator_id=bytes(16),
        rank=0,
        state="paused",
        progress_deadline_s=9.0,
        report_interval_tokens=8,
        weights_version=1,
        **SECONDS,
    ),
    wire.SubmitRequest(samples=(SAMPLE,), prompt="a"),
    wire.AssignRequest(samples=(SAMPLE,), prompt_tokens=NO_IDS),
    wire.EngineReplyPartial(request_id=1, tokens=RUN),
    wire.EngineReply(request_id=1, record=b"r", error=ERROR, is_failed=True),
    wire.ReplyAck(attempts=()),
    wire.AbortRequest(attempts=()),
    wire.Command(header=Headers.PAUSE, command_id=1),
    wire.Ack(command_id=1),
    wire.Nack(command_id=1, error=ERROR),
    wire.Heartbeat(sequence=1, status=STATUS),
    wire.Disconnect(),
    wire.UpdateWeights(command_id=1, source=SOURCE),
    wire.Prepare(command_id=1, version=1, source=SOURCE),
    wire.Commit(command_id=1, version=1),
    wire.Rollback(command_id=1, version=1),
]
FIELDS = [
    pytest.param(example, index, field, id=f"{type(example).__name__}.{field.name}")
    for example in EXAMPLES
    for index, field in enumerate(dataclasses.fields(example))
]


def test_every_message_has_an_example():
    assert {type(example) for example in EXAMPLES} >= set(wire.MESSAGE_TYPES.values())


@pytest.mark.parametrize(("example", "index", "field"), FIELDS)
def test_a_field_takes_what_the_table_says(example, index, field):
    encoded = [wire_form(value) for value in to_fields(example)]
    accepted, faults = set(), []
    for label, value in VALUES.items():
        changed = [*encoded[:index], value, *encoded[index + 1 :]]
        try:
            class_codec_of(type(example)).read(changed)
            accepted.add(label)
        except ProtocolError as fault:
            faults.append(str(fault))
    name = type(example).__name__
    assert accepted == LEGAL.get(f"{name}.{field.name}", LEGAL[field.type])
    assert all(name in fault and len(fault) < 300 for fault in faults)


@pytest.mark.parametrize("example", EXAMPLES)
def test_a_missing_or_surplus_field_is_refused(example):
    encoded = to_fields(example)
    for changed in (encoded[:-1], [*encoded, None], None, {}, "ab"):
        with pytest.raises(ProtocolError, match=rf"{type(example).__name__} has \d+ fields, got"):
            class_codec_of(type(example)).read(changed)


@pytest.mark.parametrize("example", EXAMPLES)
def test_the_sender_is_told_of_a_wrong_value_too(example):
    for field in dataclasses.fields(example):
        try:
            wrong = dataclasses.replace(example, **{field.name: object()})
        except (AttributeError, TypeError, ProtocolError):
            continue  # told when it is made
        with pytest.raises(ProtocolError, match=rf"{type(example).__name__}\.{field.name}: "):
            to_fields(wrong)


def test_the_fault_names_the_way_to_it():
    source = dataclasses.replace(SOURCE, manifest={"w": dataclasses.replace(TENSOR, offset=-1)})
    with pytest.raises(ProtocolError) as caught:
        wire.encode(wire.Prepare(command_id=1, version=1, source=source))
    assert str(caught.value) == (
        "Prepare.source: WeightsSource.manifest: TensorEntry.offset: "
        "int -1 is not in [0, 9223372036854775807]"
    )


@pytest.mark.parametrize("hint", [int, float, list, dict, object, "int | str", tuple[int, str]])
def test_an_annotation_that_says_too_little_is_refused_when_first_used(hint):
    with pytest.raises(TypeError, match="no field of a message"):
        codec_of(hint)


def wire_form(value):
    """What msgpack hands over for what it was given."""
    if isinstance(value, memoryview):
        return value.tobytes()
    return [wire_form(part) for part in value] if isinstance(value, list) else value
