"""Each field of a message accepts the values of its annotation and refuses others, by one table."""

from __future__ import annotations

import msgspec
import pytest
from msgspec import structs

from rollout import ProtocolError
from rollout.coordinator.protocol.codec import decode, encode, require_valid
from rollout.coordinator.protocol.messages import MESSAGE_TYPES, Commit, Prepare
from rollout.wire import FAULTS, Message, pack
from tests.coordinator.message_examples import EXAMPLES, MESSAGES, SOURCE, TERMS

DEEP = {"a": [[[[[[[[1]]]]]]]]}  # 9 levels
# Values that replace a field, as msgpack decodes them.
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

FIELDS = [
    pytest.param(example, index, name, id=f"{type(example).__name__}.{name}")
    for example in EXAMPLES
    for index, name in enumerate(example.__struct_fields__)
]


def read(cls: type, fields: object) -> object:
    """Send a message or part with these fields. Returns it as received."""
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
    assert examples >= set(MESSAGE_TYPES.values())


@pytest.mark.parametrize(("example", "index", "name"), FIELDS)
def test_each_field_accepts_the_values_of_the_table(example, index, name):
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


def test_values_that_msgpack_cannot_carry_are_not_sent():
    with pytest.raises(
        ProtocolError, match="Commit cannot be sent: object cannot be part of a message"
    ):
        encode(Commit(command_id=object(), version=1))
    with pytest.raises(ProtocolError, match="Commit cannot be sent"):
        encode(Commit(command_id=2**64, version=1))


def test_the_fault_names_the_way_to_it():
    source = structs.replace(SOURCE, lora=structs.replace(TERMS, ranks={"q": -1}))
    with pytest.raises(ProtocolError) as caught:
        require_valid(Prepare(command_id=1, version=1, source=source))
    assert str(caught.value) == "Prepare.source: Expected `int` >= 0 - at `$[3][5][3][...]`"
