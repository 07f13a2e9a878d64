"""BucketWriter and BucketReader: tensors of any size arrive whole, and a changed byte is found."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rollout.errors import WeightUpdateError
from rollout.weights.transports.buckets import BucketHeader, BucketReader, BucketWriter, PushEnd
from tests.tiny_models import IS_LONG

DTYPES = [torch.float32, torch.bfloat16, torch.uint8, torch.bool, torch.int64, torch.float8_e5m2]
SHAPES = st.lists(st.integers(0, 5), max_size=3).map(tuple)
Sent = list[tuple[bytes, Tensor]]


def sent(tensors: dict[str, Tensor], bucket_bytes: int) -> tuple[Sent, PushEnd]:
    buckets: Sent = []
    buffer_N = torch.empty(bucket_bytes, dtype=torch.uint8)
    writer = BucketWriter(buffer_N, lambda header, bytes_N: buckets.append((header, bytes_N + 0)))
    for name, tensor in tensors.items():
        writer.write(name, tensor)
    return buckets, writer.end()


def received(buckets: Sent, end: PushEnd) -> dict[str, Tensor]:
    reader = BucketReader(torch.device("cpu"))
    for encoded, bytes_N in buckets:
        reader.read(encoded, msgspec.msgpack.decode(encoded, type=BucketHeader), bytes_N)
    return reader.finish(end)


def made(kinds: list[tuple[torch.dtype, tuple[int, ...]]]) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(len(kinds))
    return {
        f"w{i}": torch.randint(0, 2, shape, generator=generator).to(dtype)
        for i, (dtype, shape) in enumerate(kinds)
    }


@settings(max_examples=300 if IS_LONG else 40, deadline=None)
@given(
    kinds=st.lists(st.tuples(st.sampled_from(DTYPES), SHAPES), max_size=8),
    bucket_bytes=st.integers(1, 20).map(lambda n: 8 * n),
)
def test_bucket_reader_rebuilds_tensors_from_buckets_of_any_size(
    kinds: list[tuple[torch.dtype, tuple[int, ...]]], bucket_bytes: int
) -> None:
    tensors = made(kinds)
    buckets, end = sent(tensors, bucket_bytes)
    assert all(len(bytes_N) <= bucket_bytes for _, bytes_N in buckets)
    came = received(buckets, end)
    assert list(came) == list(tensors)
    for name, tensor in tensors.items():
        assert came[name].dtype == tensor.dtype
        assert came[name].shape == tensor.shape
        assert torch.equal(came[name].double(), tensor.double())


def weights() -> dict[str, Tensor]:
    return {"a": torch.arange(10.0), "b": torch.arange(3), "c": torch.ones(2, 2)}


def with_another_byte(buckets: Sent, end: PushEnd) -> tuple[Sent, PushEnd]:
    buckets[1][1][5] ^= 1
    return buckets, end


def without_one(buckets: Sent, end: PushEnd) -> tuple[Sent, PushEnd]:
    return buckets[:1] + buckets[2:], end


def exchanged(buckets: Sent, end: PushEnd) -> tuple[Sent, PushEnd]:
    return [buckets[1], buckets[0], *buckets[2:]], end


def twice(buckets: Sent, end: PushEnd) -> tuple[Sent, PushEnd]:
    return [buckets[0], *buckets], end


def of_another_checksum(buckets: Sent, end: PushEnd) -> tuple[Sent, PushEnd]:
    return buckets, PushEnd(end.num_buckets, "0" * 16)


def cut_off(buckets: Sent, end: PushEnd) -> tuple[Sent, PushEnd]:
    return buckets[:-1], end


def ended_by_the_sender(buckets: Sent, end: PushEnd) -> tuple[Sent, PushEnd]:
    return buckets[:1], PushEnd(1, "", "'b' holds NaN")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (with_another_byte, r"bucket 2, of 'a' to 'b', does not match its hash"),
        (without_one, r"a chunk of 'b' is not the next one"),
        (exchanged, r"a chunk of 'a' is not the next one"),
        (twice, r"a chunk of 'a' is not the next one"),
        (of_another_checksum, r"4 buckets with the checksum \w+ have arrived, not 4 with 0000"),
        (cut_off, r"3 buckets with the checksum \w+ have arrived, not 4"),
        (ended_by_the_sender, r"the sender ended the push: 'b' holds NaN"),
    ],
)
def test_bucket_reader_names_the_fault_of_a_changed_push(
    change: Callable[[Sent, PushEnd], tuple[Sent, PushEnd]], message: str
) -> None:
    buckets, end = sent(weights(), 24)
    with pytest.raises(WeightUpdateError, match=message):
        received(*change(buckets, end))


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        (1, "carrier", "'a' has the unknown dtype 'carrier'"),
        (2, (5,), "'a' has more bytes than 5 float32"),
        (4, 100, "not the next one"),
    ],
)
def test_bucket_reader_refuses_a_header_that_does_not_fit_its_bucket(
    field: int, value: object, message: str
) -> None:
    buckets, end = sent({"a": torch.arange(10.0)}, 40)
    tag, chunks, num_bytes, hash_ = msgspec.msgpack.decode(buckets[0][0])
    chunks[0][field] = value
    encoded = msgspec.msgpack.encode((tag, chunks, num_bytes, hash_))
    with pytest.raises(WeightUpdateError, match=message):
        received([(encoded, buckets[0][1])], end)
