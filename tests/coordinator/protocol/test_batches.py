"""Batches of frames: in order, in bounded memory; a malformed frame does not affect the others."""

from __future__ import annotations

import tracemalloc

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout.coordinator.protocol.codec import (
    MAX_BATCH_FRAMES,
    batched,
    decode,
    encode,
    frames_in,
)
from rollout.coordinator.protocol.messages import Ack, Attempt, Headers, ReplyAck
from rollout.errors import ProtocolError

MiB = 2**20
sizes = st.integers(2, 300) | st.sampled_from([2**14 - 5, 2**14, 2**17, MiB])


def batch_of(*frames: bytes) -> bytes:
    return msgpack.packb([int(Headers.BATCH), list(frames)])


@given(st.lists(sizes, max_size=20), st.sampled_from([MiB + 8, 2 * MiB]))
def test_frames_arrive_as_they_were_and_no_batch_is_longer_than_allowed(lengths, max_bytes):
    frames = [bytes([0x92, i]) + bytes(length - 2) for i, length in enumerate(lengths)]
    sent = list(batched(frames, max_bytes))
    assert [frame for together, _ in sent for frame in frames_in(together)] == frames
    assert [num for _, num in sent] == [len(frames_in(together)) for together, _ in sent]
    assert all(len(together) <= max_bytes for together, _ in sent)


def test_batched_joins_small_frames_and_keeps_single_and_large_ones():
    small, large = encode(Ack(command_id=1)), bytes(2**15)
    assert [num for _, num in batched([small] * 600)] == [MAX_BATCH_FRAMES, MAX_BATCH_FRAMES, 88]
    assert list(batched([small, large, small, small]))[:2] == [(small, 1), (large, 1)]


def test_a_batch_within_a_batch_and_one_that_cannot_be_read_are_no_messages():
    (inner,) = frames_in(batch_of(batch_of(encode(Ack(command_id=1)))))
    with pytest.raises(ProtocolError, match="unknown header 0x54"):
        decode(inner)
    for broken in (
        b"\x92\x54\xc0",
        b"\x92\x54\x91\xa1a",
        batch_of(b"") + b"\0",
        batch_of(*[b"ab"] * (MAX_BATCH_FRAMES + 1)),
        b"\x92\x54\xdd\xff\xff\xff\xff" + bytes(MiB),
        msgpack.packb([int(Headers.BATCH), [], None]),
    ):
        with pytest.raises(ProtocolError, match="Batch: "):
            frames_in(broken)


@pytest.mark.parametrize("item", [b"\xc4\x00", b"\xc4\x02ab", b"\x90"])
def test_a_full_batch_of_small_frames_is_not_built(item):
    num_items = 64 * MiB // len(item) - 16
    frame = b"\x92\x54\xdd" + num_items.to_bytes(4, "big") + item * num_items
    tracemalloc.start()
    try:
        with pytest.raises(ProtocolError, match="Batch: "):
            frames_in(frame)
        assert tracemalloc.get_traced_memory()[1] < MiB
    finally:
        tracemalloc.stop()


def test_a_batch_costs_its_bytes_once():
    acks = ReplyAck(attempts=tuple(Attempt(request_id=i) for i in range(1000)))
    frame = batch_of(*[encode(acks)] * MAX_BATCH_FRAMES)
    tracemalloc.start()
    try:
        assert len(frames_in(frame)) == MAX_BATCH_FRAMES
        assert tracemalloc.get_traced_memory()[1] < 1.1 * len(frame)
    finally:
        tracemalloc.stop()
