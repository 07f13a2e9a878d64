"""Each field takes what its annotation says and refuses the rest, by one table."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from msgspec import structs

from rollout import ProtocolError, SamplingParams
from rollout.control.commands import (
    COMMANDS,
    ChecksumWeights,
    Pause,
    Resume,
    SetGenerationEpoch,
    Suspend,
)
from rollout.coordinator.protocol import messages as wire
from rollout.coordinator.protocol.codec import decode, encode, require_valid
from rollout.coordinator.protocol.packed import pack_params
from rollout.requests.token_runs import TokenRun, TokenRuns, TopNRun
from rollout.weights import source as weights_source
from rollout.wire import FAULTS, Message, pack

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
    "list of 16": [0] * 16,
    "list of 17": [0] * 17,
    "empty map": {},
    "map": {"a": [1, {"b": None}]},
    "bytes keys": {b"a": 1},
    "deep map": DEEP,
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
    "Count": _COUNT,
    "Name | None": {"none", "text", "empty text"},
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
    "Connect.protocol_version": set(),  # but for the one of today
    "Register.protocol_version": set(),
    "AssignRequest.prompt_tokens": _ARRAY - {"-1 in bytes"},
    "SubmitRequest.prompt_tokens": _ARRAY - {"-1 in bytes"},
    "Flags": _NO_TOKENS,
    "Int32s": _NO_TOKENS,
    "Ids": _NO_TOKENS,
    "TokenIds": _NO_TOKENS,
    "TokenIds | None": _NO_TOKENS | {"none"},
    "Float64s": _NO_TOKENS,
    "Float32s": _NO_TOKENS,
    "Float32s | None": _NO_TOKENS | {"none"},
    "PlainMap | None": _PLAIN | {"none"},
    "Settings": {"empty map"},
    "Samples": set(),
    "Attempts": _LIST,
    "ResourceNames": _LIST,
    "TensorEntry.shape": _LIST | {"list of 16"},
    "Sample.sampling_params": _BYTES,
    "TopNRun.counts": _ARRAY,  # no or absent values at four positions
    "TokenRun": set(),
    "TokenRuns": set(),
    "TokenRun | None": {"none"},
    "TopNRun | None": {"none"},
    "WeightsSource": set(),
    "WeightsSource | None": {"none"},
    "LoraTerms | None": {"none"},
    "LoraTerms.ranks": {"empty map"},
    "LoraTerms.alphas": {"empty map"},
    "Alpha": _SMALL | {"minus one", "1.5", "-0.5"},
    "WireError": set(),
    "WireError | None": {"none"},
    "EngineStatus | None": {"none"},
}

NO_IDS = np.zeros(0, np.int32)
TOP_N = TopNRun(counts=NO_IDS, token_ids=NO_IDS, log_probs=NO_IDS.astype(np.float32))
RUN = TokenRun(
    offset=0,
    entry_version=0,
    token_ids=NO_IDS,
    policy_versions=NO_IDS,
    context_kv_version_min=NO_IDS,
    context_kv_version_mean=NO_IDS.astype(np.float64),
)
RUNS = TokenRuns(
    **dict.fromkeys(("request_ids", "attempts", "offsets"), NO_IDS.astype(np.int64)),
    **dict.fromkeys(("counts", "entry_versions", "token_ids", "policy_versions"), NO_IDS),
    context_kv_version_min=NO_IDS,
    context_kv_version_mean=NO_IDS.astype(np.float64),
    **dict.fromkeys(("has_log_probs", "has_ranks", "has_top_n"), NO_IDS.astype(np.uint8)),
    log_probs=NO_IDS.astype(np.float32),
    ranks=NO_IDS,
)
SAMPLE = wire.Sample(request_id=1, sampling_params=pack_params(SamplingParams()))
ERROR = wire.WireError(type_name="ConfigError", message="no")
TENSOR = weights_source.TensorEntry(dtype="float32", shape=(2, 3), offset=0, num_bytes=24)
TERMS = weights_source.LoraTerms(
    rank=2, alpha=4.0, use_rslora=False, ranks={"q": 3}, alphas={"q": 1.0}
)
SOURCE = weights_source.WeightsSource(
    kind="shm", address="w", manifest=b"", checksum="c", lora=TERMS
)
STATUS = wire.EngineStatus(
    state="running", num_steps=1, num_waiting=0, num_running=1, weights_version=0
)
SECONDS = {"lease_s": 2.0, "heartbeat_s": 0.5}
EXAMPLES = [
    TOP_N,
    RUN,
    RUNS,
    SAMPLE,
    ERROR,
    TENSOR,
    TERMS,
    SOURCE,
    STATUS,
    wire.Attempt(request_id=1),
    wire.Connect(client_id=bytes(16)),
    wire.ConnectAck(
        coordinator_id=bytes(16),
        state="",
        data_parallel_size=2,
        weights_version=0,
        answer_grace_s=1.0,
        **SECONDS,
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
        state="paused",
        report_interval_tokens=8,
        weights_version=1,
        **SECONDS,
    ),
    wire.SubmitRequest(samples=(SAMPLE,), prompt_tokens=NO_IDS),
    wire.AssignRequest(samples=(SAMPLE,), prompt_tokens=NO_IDS),
    wire.EngineReplyPartial(request_id=1, tokens=RUN),
    wire.EngineReply(request_id=1, record=b"r", error=ERROR, is_failed=True),
    wire.ReplyAck(attempts=()),
    wire.AbortRequest(attempts=()),
    Pause(command_id=1),
    Suspend(command_id=1, mode="offload"),
    Resume(only="weights"),
    SetGenerationEpoch(version=1),
    ChecksumWeights(),
    wire.Ack(command_id=1),
    wire.Nack(command_id=1, error=ERROR),
    wire.Heartbeat(sequence=1, status=STATUS),
    wire.Disconnect(),
    wire.Credit(num_granted=5),
    wire.Progress(runs=RUNS),
    wire.UpdateWeights(command_id=1, source=SOURCE),
    wire.Prepare(command_id=1, version=1, source=SOURCE),
    wire.Commit(command_id=1, version=1),
    wire.Rollback(command_id=1),
]
MESSAGES = [example for example in EXAMPLES if isinstance(example, Message)]
FIELDS = [
    pytest.param(example, index, name, id=f"{type(example).__name__}.{name}")
    for example in EXAMPLES
    for index, name in enumerate(example.__struct_fields__)
]


def read(cls: type, fields: object) -> object:
    """What arrives of a part, or of a message, that is sent as these fields."""
    if issubclass(cls, Message):
        tag = [cls.__struct_config__.tag]
        return decode(pack(tag + fields if isinstance(fields, list) else fields))
    try:
        return msgspec.msgpack.decode(pack(fields), type=cls)
    except FAULTS as fault:
        raise ProtocolError(str(fault)) from fault


def fields_of(example: msgspec.Struct) -> list:
    return [getattr(example, name) for name in example.__struct_fields__]


def annotation_of(cls: type, name: str) -> str:
    return next(base.__annotations__[name] for base in cls.__mro__ if name in base.__annotations__)


def test_every_message_has_an_example():
    examples = {type(example) for example in EXAMPLES}
    assert examples >= set(wire.MESSAGE_TYPES.values()) - set(COMMANDS)
    assert examples & set(COMMANDS)


@pytest.mark.parametrize(("example", "index", "name"), FIELDS)
def test_a_field_takes_what_the_table_says(example, index, name):
    encoded, cls = fields_of(example), type(example)
    accepted, faults = set(), []
    for label, value in VALUES.items():
        changed = [*encoded[:index], value, *encoded[index + 1 :]]
        try:
            read(cls, changed)
            accepted.add(label)
        except ProtocolError as fault:
            faults.append(str(fault))
    assert accepted == LEGAL.get(f"{cls.__name__}.{name}", LEGAL.get(annotation_of(cls, name)))
    assert all(len(fault) < 300 for fault in faults)
    if isinstance(example, Message):
        assert all(cls.__name__ in fault or "speaks protocol" in fault for fault in faults)


@pytest.mark.parametrize("example", EXAMPLES)
def test_a_missing_or_surplus_field_is_refused(example):
    encoded, cls = fields_of(example), type(example)
    num_required = sum(f.required for f in msgspec.structs.fields(cls))
    too_few = [encoded[: num_required - 1]] if num_required else []
    for changed in (*too_few, [*encoded, None], None, {}, "ab"):
        with pytest.raises(ProtocolError):
            read(cls, changed)


@pytest.mark.parametrize("example", MESSAGES)
def test_require_valid_names_the_field_with_a_wrong_value(example):
    for name in example.__struct_fields__:
        try:
            wrong = structs.replace(example, **{name: [[]]})
        except (AttributeError, TypeError, ProtocolError):
            continue  # known when it is made
        with pytest.raises(ProtocolError, match=rf"{type(example).__name__}\.{name}: "):
            require_valid(wrong)


def test_what_msgpack_has_no_form_for_is_not_sent():
    with pytest.raises(
        ProtocolError, match="Commit cannot be sent: object cannot be part of a message"
    ):
        encode(wire.Commit(command_id=object(), version=1))
    with pytest.raises(ProtocolError, match="Commit cannot be sent"):
        encode(wire.Commit(command_id=2**64, version=1))


def test_the_fault_names_the_way_to_it():
    source = structs.replace(SOURCE, lora=structs.replace(TERMS, ranks={"q": -1}))
    with pytest.raises(ProtocolError) as caught:
        require_valid(wire.Prepare(command_id=1, version=1, source=source))
    assert str(caught.value) == "Prepare.source: Expected `int` >= 0 - at `$[3][5][3][...]`"
