"""Tensors and top-n dictionaries over msgpack."""

from __future__ import annotations

import msgpack
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rollout.errors import ProtocolError
from rollout.requests import deserialize_tensor, serialize_tensor
from rollout.requests.codec import decode_tensor, decode_top_n, encode_tensor, encode_top_n

DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int32,
    torch.int64,
    torch.bfloat16,
    torch.float16,
    torch.float32,
    torch.float64,
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 4), (2, 3)])
def test_tensor_keeps_dtype_shape_and_bits(dtype, shape):
    tensor = torch.randint(0, 2, shape).to(dtype)
    decoded = decode_tensor(msgpack.unpackb(msgpack.packb(encode_tensor(tensor))))
    assert decoded.dtype == dtype
    assert decoded.shape == tensor.shape
    assert torch.equal(decoded, tensor)


def test_nan_survives_as_the_same_bits():
    tensor = torch.tensor([float("nan"), -0.0, float("inf")])
    decoded = decode_tensor(encode_tensor(tensor))
    assert torch.equal(decoded.view(torch.int32), tensor.view(torch.int32))


def test_strided_tensor_is_sent_by_its_values():
    tensor = torch.arange(6).reshape(2, 3).T
    assert torch.equal(decode_tensor(encode_tensor(tensor)), tensor)


def test_decoded_tensor_can_be_written():
    decoded = decode_tensor(encode_tensor(torch.zeros(2)))
    decoded += 1
    assert decoded.tolist() == [1.0, 1.0]


@pytest.mark.parametrize(
    "change", [{"dtype": "nn"}, {"dtype": "float33"}, {"shape": [5]}, {"data": b""}]
)
def test_tensor_that_does_not_fit_its_bytes_is_refused(change):
    with pytest.raises(ProtocolError):
        decode_tensor({**encode_tensor(torch.zeros(3)), **change})


def test_list_form_keeps_values_and_shape():
    tensor = torch.tensor([[1, 2], [3, 4]])
    assert serialize_tensor(tensor) == [[1, 2], [3, 4]]
    assert torch.equal(deserialize_tensor(serialize_tensor(tensor)), tensor)


@given(
    st.lists(
        st.none() | st.dictionaries(st.integers(0, 200_000) | st.text(), st.floats(-50, 0)),
        max_size=5,
    )
)
def test_top_n_keeps_its_keys_and_their_order(top_n):
    decoded = decode_top_n(msgpack.unpackb(msgpack.packb(encode_top_n(top_n))))
    assert decoded == top_n
    assert [row and list(row) for row in decoded] == [row and list(row) for row in top_n]
