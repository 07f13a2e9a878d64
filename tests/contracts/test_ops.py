"""Contract of the layers' operations against float64: 1e-5 in float32, 1e-2 in bfloat16."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from rollout.backends.base import Ops
from tests.contracts.implementations import OPS, is_interpreted, prepared_handle

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 1e-2}

all_ops = pytest.mark.parametrize("name", OPS)
dtypes = st.sampled_from([torch.float32, torch.bfloat16])


@pytest.fixture(params=OPS)
def ops(request: pytest.FixtureRequest) -> Ops:
    return OPS[request.param]()


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def computable(name: str, dtype: torch.dtype) -> torch.dtype:
    """Return float16 for bfloat16 in Triton's interpreter, which truncates to bfloat16."""
    return torch.float16 if is_interpreted(name) and dtype == torch.bfloat16 else dtype


def assert_near(actual: Tensor, expected_f64: Tensor, dtype: torch.dtype) -> None:
    assert actual.dtype == dtype
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(actual.double(), expected_f64, rtol=tolerance, atol=tolerance)


def norm_f64(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()


@all_ops
@given(
    rows=st.sampled_from([0, 1, 2, 7, 64, 128, 129, 300]),
    has_bias=st.booleans(),
    in_features=st.sampled_from([8, 33, 96]),
    out_features=st.sampled_from([1, 40, 257]),
)
def test_linear_is_the_product_with_the_transposed_weight(
    name: str, rows: int, has_bias: bool, in_features: int, out_features: int
) -> None:
    ops = OPS[name]()
    weight, bias = randn(out_features, in_features), randn(out_features, seed=1)
    x = randn(rows, in_features, seed=2)
    handle = prepared_handle(ops, weight, bias if has_bias else None)
    expected = x.double() @ weight.double().T + (bias.double() if has_bias else 0)
    torch.testing.assert_close(ops.linear(x, handle).double(), expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("rows", [1, 16, 200])
def test_refresh_follows_an_in_place_change_of_the_weight(ops: Ops, rows: int) -> None:
    weight, x = randn(24, 32), randn(rows, 32, seed=1)
    handle = prepared_handle(ops, weight)
    ops.linear(x, handle)
    weight.mul_(-2.0)
    ops.refresh(handle)
    torch.testing.assert_close(ops.linear(x, handle), x @ weight.T, rtol=1e-5, atol=1e-4)


def test_linear_takes_weights_of_a_module_that_requires_gradients(ops: Ops) -> None:
    layer = torch.nn.Linear(32, 24)
    handle = prepared_handle(ops, layer.weight, layer.bias)
    x = randn(4, 32)
    with torch.inference_mode():
        torch.testing.assert_close(ops.linear(x, handle), layer(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rows", [1, 5])
def test_linear_works_in_bfloat16(ops: Ops, rows: int) -> None:
    weight, x = randn(24, 32, dtype=torch.bfloat16), randn(rows, 32, seed=1, dtype=torch.bfloat16)
    result = ops.linear(x, prepared_handle(ops, weight))
    torch.testing.assert_close(
        result.double(), x.double() @ weight.double().T, rtol=0.02, atol=0.05
    )


@all_ops
@given(
    shape=st.sampled_from([(1, 512), (5, 64), (3, 4, 40), (2, 7), (0, 16)]),
    dtype=dtypes,
    scale=st.sampled_from([1e-3, 1.0, 100.0]),
)
def test_rms_norm_divides_by_the_root_mean_square(
    name: str, shape: tuple[int, ...], dtype: torch.dtype, scale: float
) -> None:
    dtype = computable(name, dtype)
    x = (randn(*shape) * scale).to(dtype)
    weight = (1 + randn(shape[-1], seed=1) / 4).to(dtype)
    assert_near(OPS[name]().rms_norm(x, weight, 1e-6), norm_f64(x, weight, 1e-6), dtype)


def test_rms_norm_takes_a_view_with_gaps_between_its_rows(ops: Ops) -> None:
    """Heads are such a view of a fused projection."""
    x = randn(6, 10, 32)[:, 2:7]
    weight = randn(32, seed=1)
    assert_near(ops.rms_norm(x, weight, 1e-5), norm_f64(x, weight, 1e-5), torch.float32)


@all_ops
@given(rows=st.integers(0, 9), size=st.sampled_from([7, 64, 512]), dtype=dtypes)
def test_add_rms_norm_returns_the_norm_and_the_sum(
    name: str, rows: int, size: int, dtype: torch.dtype
) -> None:
    dtype = computable(name, dtype)
    x, residual = randn(rows, size, dtype=dtype), randn(rows, size, seed=1, dtype=dtype)
    weight = randn(size, seed=2, dtype=dtype)
    before = x.clone(), residual.clone()
    normed, total = OPS[name]().add_rms_norm(x, residual, weight, 1e-6)
    assert torch.equal(total, x + residual)
    assert_near(normed, norm_f64(total, weight, 1e-6), dtype)
    assert torch.equal(x, before[0])
    assert torch.equal(residual, before[1])


@all_ops
@given(
    tokens=st.integers(0, 9),
    heads=st.sampled_from([(1, 1), (8, 4), (14, 2)]),
    head_dim=st.sampled_from([2, 16, 64, 128]),
    dtype=dtypes,
)
def test_rotary_turns_pairs_of_the_two_halves(
    name: str, tokens: int, heads: tuple[int, int], head_dim: int, dtype: torch.dtype
) -> None:
    fused = randn(tokens, (heads[0] + 2 * heads[1]) * head_dim, dtype=dtype)
    q, k, _ = (
        part.unflatten(-1, (-1, head_dim))
        for part in fused.split([heads[0] * head_dim, heads[1] * head_dim, heads[1] * head_dim], -1)
    )
    angles = randn(tokens, head_dim // 2, seed=1).repeat(1, 2) * 50
    before = fused.clone()
    rotated = OPS[name]().rotary(q, k, angles.cos(), angles.sin())
    cos, sin = angles.cos().double()[:, None], angles.sin().double()[:, None]
    for actual, x in zip(rotated, (q.double(), k.double()), strict=True):
        low, high = x.chunk(2, -1)
        assert_near(actual, x * cos + torch.cat((-high, low), -1) * sin, dtype)
        assert actual.shape == x.shape
    assert torch.equal(fused, before)


def gelu_tanh(gate: torch.Tensor) -> torch.Tensor:
    inner = (2 / torch.pi) ** 0.5 * (gate + 0.044715 * gate**3)
    return 0.5 * gate * (1 + inner.tanh())


GATES = {"silu_mul": lambda gate: gate * gate.sigmoid(), "gelu_mul": gelu_tanh}


@pytest.mark.parametrize("gate_name", GATES)
@all_ops
@given(rows=st.integers(0, 9), size=st.sampled_from([1, 30, 1728]), dtype=dtypes)
def test_an_activation_gates_the_second_half(
    name: str, gate_name: str, rows: int, size: int, dtype: torch.dtype
) -> None:
    dtype = computable(name, dtype)
    gate_up = randn(rows, 2 * size, dtype=dtype) * 5
    gate, up = gate_up.double().chunk(2, -1)
    gated = getattr(OPS[name](), gate_name)(gate_up)
    assert_near(gated, GATES[gate_name](gate) * up, dtype)


@all_ops
@given(rows=st.integers(0, 9), size=st.sampled_from([2, 30, 512]), dtype=dtypes)
def test_layer_norm_centres_and_scales(name: str, rows: int, size: int, dtype: torch.dtype) -> None:
    dtype = computable(name, dtype)
    x, weight = randn(rows, size, dtype=dtype) * 3 + 2, randn(size, dtype=dtype)
    centred = x.double() - x.double().mean(-1, keepdim=True)
    deviation = (centred.square().mean(-1, keepdim=True) + 1e-3).sqrt()
    expected = centred / deviation * weight.double()
    assert_near(OPS[name]().layer_norm(x, weight, 1e-3), expected, dtype)
