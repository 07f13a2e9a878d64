"""`decode` of any bytes returns a message or raises ProtocolError, in bounded memory."""

from __future__ import annotations

import os
import time
import tracemalloc

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout import DynamicInferenceRequestRecord, ProtocolError, SamplingParams
from rollout.control.commands import COMMANDS
from rollout.coordinator.protocol.codec import decode, encode
from rollout.coordinator.protocol.messages import (
    MESSAGE_TYPES,
    EngineReply,
    Headers,
)
from rollout.coordinator.protocol.packed import (
    pack_params,
    unpack_params,
    unpack_record,
)
from rollout.errors import RolloutError
from tests.coordinator.message_strategies import TYPES, messages, plain
from tests.coordinator.protocol.test_message_fields import EXAMPLES
from tests.run_seed import run_seed

LONG = os.environ.get("ROLLOUT_TEST_LONG") == "1"
NUM_FRAMES = 100_000 if LONG else 10_000
MiB = 2**20
BOUND_S = 20.0  # of CPU, for what hangs
FRAMES = [encode(example) for example in EXAMPLES if type(example) in TYPES]


def outcome(frame: bytes) -> type:
    """The type of what decode returns or raises; another error than ours is raised on."""
    try:
        return type(decode(frame))
    except ProtocolError:
        return ProtocolError


def traced(frame: bytes) -> tuple[type, int, float]:
    """Outcome, peak bytes that Python allocated, CPU seconds."""
    tracemalloc.start()
    start = time.process_time()
    try:
        return outcome(frame), tracemalloc.get_traced_memory()[1], time.process_time() - start
    finally:
        tracemalloc.stop()


# ---- a frame that is no message


@pytest.mark.parametrize(
    ("frame", "reason"),
    [
        (b"", "starts with a header"),
        (b"\xc1\x01", "starts with a header"),
        (b"\xc0\x01", "starts with a header"),
        (b"\x81\x01\x01", "starts with a header"),
        (b"\x90\x01", "starts with a header"),
        (b"\xdc\x00\x01\x48", "starts with a header"),
        (b"\x91\xa1a", "unknown header 0xa1"),
        (b"\x91\xc3", "unknown header 0xc3"),
        (b"\x91\x05", "unknown header 0x05"),
        (b"\x91\xff", "unknown header 0xff"),
        (b"\x91\x48", "Heartbeat: Expected `array` of at least length 2, got 1"),
        (b"\x93\x48\xff\xc0", "Heartbeat.sequence: Expected `int` >= 0"),
        (b"\x93\x48\x01\xc0\xc0", "Heartbeat: MessagePack data is malformed: trailing"),
        (b"\x93\x48\x01", "Heartbeat: Input data was truncated"),
        (b"\x92\x3c\xa1\xff", "Disconnect: 'utf-8' codec"),
        (b"\x93\x3c\xd6\xff\0\0\0\0\xc2", "Disconnect.reason: Expected `str`, got `ext`"),
        (b"\x93\x3c\xc7\x00\x01\xc2", "Disconnect.reason: Expected `str`, got `ext`"),
    ],
)
def test_decode_names_the_fault(frame, reason):
    with pytest.raises(ProtocolError) as caught:
        decode(frame)
    assert reason in str(caught.value)
    assert len(str(caught.value)) < 300


def test_no_beginning_of_a_message_is_a_message():
    for frame in FRAMES:
        for end in range(len(frame)):
            with pytest.raises(ProtocolError):
                decode(frame[:end])


@settings(max_examples=200 if LONG else 20, deadline=None)
@given(messages(), st.binary(min_size=1, max_size=8))
def test_decode_refuses_trailing_bytes(message, tail):
    with pytest.raises(ProtocolError):
        decode(encode(message) + tail)


def test_random_bytes_raise_nothing_else():
    rng = np.random.default_rng(run_seed())
    outcomes = [outcome(rng.bytes(rng.integers(0, 200))) for _ in range(NUM_FRAMES // 2)]
    headers = [int(header) for header in Headers]
    for _ in range(NUM_FRAMES // 2):
        header = int(rng.choice(headers))
        start = bytes([0x90 | int(rng.integers(0, 12)), header])
        outcomes.append(outcome(start + rng.bytes(rng.integers(0, 60))))
    assert len(outcomes) == NUM_FRAMES
    assert set(outcomes) <= {ProtocolError, *TYPES}


def mutated(frame: bytes, rng: np.random.Generator) -> bytes:
    """`frame` with one to three bytes or pieces changed."""
    changed = bytearray(frame)
    for _ in range(rng.integers(1, 4)):
        at, kind = int(rng.integers(0, len(changed) + 1)), rng.integers(0, 5)
        if kind == 0 and at < len(changed):
            changed[at] = rng.integers(0, 256)
        elif kind == 1 and at < len(changed):
            changed[at] ^= 1 << int(rng.integers(0, 8))
        elif kind == 2:
            changed[at:at] = rng.bytes(rng.integers(1, 5))
        elif kind == 3:
            del changed[at : at + int(rng.integers(1, 5))]
        else:
            other = FRAMES[rng.integers(0, len(FRAMES))]
            changed[at:] = other[min(at, len(other)) :]
    return bytes(changed)


def test_mutated_messages_raise_nothing_else():
    rng = np.random.default_rng(run_seed() + 1)
    outcomes = [outcome(mutated(FRAMES[i % len(FRAMES)], rng)) for i in range(NUM_FRAMES)]
    num_refused = outcomes.count(ProtocolError)
    assert set(outcomes) <= {ProtocolError, *TYPES}
    assert NUM_FRAMES // 4 < num_refused < NUM_FRAMES  # both ways out are tried


@settings(max_examples=1000 if LONG else 100, deadline=None)
@given(st.sampled_from(sorted(Headers)), st.lists(plain, max_size=10))
def test_fields_of_any_type_raise_nothing_else(header, fields):
    assert outcome(msgpack.packb([int(header), *fields])) in {ProtocolError, *TYPES}


@settings(max_examples=1000 if LONG else 100, deadline=None)
@given(plain, st.sampled_from(["requests", "latency"]))
def test_packed_parts_of_any_type_raise_nothing_else(value, key):
    encoded = {"requests": [], "latency": None, key: [value]}
    for packed in (msgpack.packb(value), msgpack.packb(encoded)):
        for read, kind in (
            (unpack_record, DynamicInferenceRequestRecord),
            (unpack_params, SamplingParams),
        ):
            try:
                assert isinstance(read(packed), kind)
            except RolloutError:
                continue


def test_mutated_params_raise_nothing_else():
    rng = np.random.default_rng(run_seed() + 2)
    packed = pack_params(SamplingParams(stop_words=["a"]))
    num_read = 0
    for _ in range(NUM_FRAMES // 10):
        try:
            assert isinstance(unpack_params(mutated(packed, rng)), SamplingParams)
            num_read += 1
        except RolloutError:
            continue
    assert 0 < num_read < NUM_FRAMES // 10  # both ways out are tried


# ---- what a frame claims is not what it costs


@pytest.mark.parametrize(
    "claim",
    [
        b"\xc6\xff\xff\xff\xff",
        b"\xdb\xff\xff\xff\xff",
        b"\xdd\xff\xff\xff\xff",
        b"\xdf\xff\xff\xff\xff",
        b"\xc9\xff\xff\xff\xff\x01",
        b"\xdc\xff\xff" * 1300,
        b"\xdd\x00\x00\x0f\x00" * 800,
        b"\xdd\x00\x03\xff\xff" * 10_000,
        b"\x91" * 3000,
        b"\x91" * 100_000,
        b"\x81\xa1a" * 3000,
    ],
)
@pytest.mark.parametrize("tail_bytes", [0, 100, MiB])
def test_a_claim_of_gigabytes_allocates_little(claim, tail_bytes):
    frame = b"\x95" + bytes([Headers.SUBMIT_REQUEST]) + claim + bytes(tail_bytes)
    found, peak_bytes, seconds = traced(frame)
    assert found is ProtocolError
    assert peak_bytes < 48 * MiB
    assert seconds < BOUND_S


@pytest.mark.parametrize("item", [b"\x90", b"\x80", b"\xa2ab", b"\xcb" + b"\0" * 8])
def test_a_full_frame_of_small_items_is_not_built(item):
    num_items = 64 * MiB // len(item) - 16
    frame = b"\x91\xdd" + num_items.to_bytes(4, "big") + item * num_items
    assert len(frame) <= 64 * MiB
    found, peak_bytes, seconds = traced(frame)
    assert found is ProtocolError
    assert peak_bytes < MiB
    assert seconds < BOUND_S


def test_many_full_lists_are_not_built_either():
    inner = b"\xdc\xff\xff" + b"\x90" * 65_535
    frame = b"\xdc\x03\x00" + inner * 0x300
    found, peak_bytes, _ = traced(frame)
    assert found is ProtocolError
    assert peak_bytes < MiB


def test_an_oversized_frame_is_not_looked_at():
    frame = bytes(64 * MiB + 1)
    found, peak_bytes, seconds = traced(frame)
    assert found is ProtocolError
    assert peak_bytes < MiB
    assert seconds < BOUND_S


def test_an_honest_large_reply_costs_its_bytes_once():
    frame = encode(EngineReply(request_id=1, record=bytes(8 * MiB)))
    found, peak_bytes, _ = traced(frame)
    assert found is EngineReply
    assert peak_bytes < 9 * MiB


def test_the_fault_of_a_large_frame_is_described_shortly():
    frame = msgpack.packb([int(Headers.DISCONNECT), b"x" * MiB, False])
    with pytest.raises(ProtocolError, match=r"^Disconnect.reason: Expected `str`, got `bytes`"):
        decode(frame)


def test_a_reply_ack_may_name_very_many():
    attempts = [[i, 0] for i in range(50_000)]
    assert len(decode(msgpack.packb([int(Headers.REPLY_ACK), attempts])).attempts) == 50_000


def test_every_type_of_message_is_mutated():
    mutated_types = {MESSAGE_TYPES[Headers(frame[1])] for frame in FRAMES}
    assert mutated_types >= set(TYPES) - set(COMMANDS)
