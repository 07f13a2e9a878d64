"""NativeOps rounds to bfloat16 where the reference does.

Results are equal bit for bit where nothing is summed. Where a row's sum has another order, they
rarely differ, and then by one unit in the last place.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from rollout.backends.base import Ops
from rollout.backends.cpu.ops import NativeOps
from rollout.backends.forward_batch import RotaryRounding
from rollout.backends.ops.reference import ReferenceOps, TorchOps
from tests.contracts.implementations import kernels

BF16 = torch.bfloat16
LAYER_OPS = ("rms_norm", "add_rms_norm", "layer_norm", "rotary", "gelu_mul")

rows = st.sampled_from([0, 1, 2, 7, 33])
sizes = st.sampled_from([8, 24, 64, 200, 512])
weight_dtypes = st.sampled_from([BF16, torch.float32])  # float32: with an offset added


@pytest.fixture(scope="module")
def native() -> NativeOps:
    return NativeOps(kernels())


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = BF16) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def units_apart(a: Tensor, b: Tensor) -> Tensor:
    """Return the distance in units of the last bfloat16 place; 0 if equal."""
    bits = [x.view(torch.int16).int() for x in (a, b)]
    ordered = [torch.where(x < 0, -(x & 0x7FFF), x) for x in bits]
    return (ordered[0] - ordered[1]).abs()


def assert_at_most_a_unit_apart(found: Tensor, expected: Tensor, tiny: float = 0.0) -> None:
    """Assert at most one unit apart, and mostly equal. `tiny`: allowed difference near 0."""
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
    is_near = (found.float() - expected.float()).abs() <= tiny
    assert bool(((units_apart(found, expected) <= 1) | is_near).all())
    assert int((found != expected).sum()) <= 1 + found.numel() // 1000


def norm_f64(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    x = x.double()
    return (x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()).to(BF16)


def calls(dtype: torch.dtype) -> dict[str, tuple[Tensor, ...]]:
    x, weight, heads = randn(3, 32, dtype=dtype), randn(32, dtype=dtype), randn(3, 2, 32)
    angles = randn(3, 32, dtype=torch.float32)
    return {
        "rms_norm": (x, weight),
        "add_rms_norm": (x, x, weight),
        "layer_norm": (x, weight),
        "rotary": (heads.to(dtype), heads.to(dtype), angles, angles),
        "gelu_mul": (x,),
    }


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
@pytest.mark.parametrize("name", LAYER_OPS)
def test_operations_of_layers_are_compiled_in_both_dtypes(
    native: NativeOps, name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They give the reference's values also when torch's operation is removed."""
    arguments = *calls(dtype)[name], *((1e-6,) if name.endswith("norm") else ())
    expected = getattr(ReferenceOps(), name)(*arguments)
    monkeypatch.delattr(TorchOps, name)
    found = getattr(native, name)(*arguments)
    torch.testing.assert_close(found, expected, rtol=2**-7, atol=1e-4)


@given(
    num_rows=rows,
    size=sizes,
    weight_dtype=weight_dtypes,
    rounds_first=st.booleans(),
    scale=st.sampled_from([1e-3, 1.0, 100.0]),
    gap=st.sampled_from([0, 8, 5]),
)
def test_a_norm_in_bfloat16_is_the_references_but_for_the_order_of_its_sum(
    native: NativeOps,
    num_rows: int,
    size: int,
    weight_dtype: torch.dtype,
    rounds_first: bool,
    scale: float,
    gap: int,
) -> None:
    x = (randn(num_rows, size + gap) * scale)[:, :size]
    weight = randn(size, seed=1, dtype=weight_dtype)
    found = native.rms_norm(x, weight, 1e-6, rounds_first=rounds_first)
    expected = ReferenceOps().rms_norm(x, weight, 1e-6, rounds_first=rounds_first)
    assert_at_most_a_unit_apart(found, expected)
    if not rounds_first:
        assert_at_most_a_unit_apart(found, norm_f64(x, weight, 1e-6))


@given(num_rows=rows, heads=st.sampled_from([1, 3]), size=st.sampled_from([8, 64, 128]))
def test_heads_cut_out_of_a_projection_are_normed_in_bfloat16(
    native: NativeOps, num_rows: int, heads: int, size: int
) -> None:
    x, weight = randn(num_rows, 6, size)[:, 2 : 2 + heads], randn(size, seed=1)
    assert_at_most_a_unit_apart(native.rms_norm(x, weight, 1e-6), norm_f64(x, weight, 1e-6))


@given(num_rows=rows, size=sizes, weight_dtype=weight_dtypes, rounds_first=st.booleans())
def test_the_sum_is_rounded_to_bfloat16_before_it_is_normed(
    native: NativeOps, num_rows: int, size: int, weight_dtype: torch.dtype, rounds_first: bool
) -> None:
    x, residual = randn(num_rows, size), randn(num_rows, size, seed=1) * 3
    weight = randn(size, seed=2, dtype=weight_dtype)
    results = [
        ops.add_rms_norm(x, residual, weight, 1e-6, rounds_first=rounds_first)
        for ops in (native, ReferenceOps())
    ]
    assert_at_most_a_unit_apart(results[0][0], results[1][0])
    assert torch.equal(results[0][1], x + residual)


@given(num_rows=rows, size=sizes, weight_dtype=weight_dtypes)
def test_a_layer_norm_in_bfloat16_is_the_references_but_for_the_order_of_its_sums(
    native: NativeOps, num_rows: int, size: int, weight_dtype: torch.dtype
) -> None:
    x, weight = randn(num_rows, size) * 3 + 2, randn(size, seed=1, dtype=weight_dtype)
    found = native.layer_norm(x, weight, 1e-5)
    # Where a number is nearly the mean, its distance has few digits.
    assert_at_most_a_unit_apart(found, ReferenceOps().layer_norm(x, weight, 1e-5), tiny=1e-5)


@given(
    tokens=rows,
    heads=st.sampled_from([(1, 1), (8, 4)]),
    head_dim=st.sampled_from([16, 24, 64, 128]),
    rounding=st.sampled_from(["once", "angles", "each"]),
)
def test_a_rotation_in_bfloat16_is_the_references_to_the_bit(
    native: NativeOps,
    tokens: int,
    heads: tuple[int, int],
    head_dim: int,
    rounding: RotaryRounding,
) -> None:
    fused = randn(tokens, heads[0] + 2 * heads[1], head_dim)
    q_THD, k_TGD, _ = fused.split([heads[0], heads[1], heads[1]], dim=1)
    angles = randn(tokens, head_dim // 2, seed=1, dtype=torch.float32).repeat(1, 2) * 50
    found = native.rotary(q_THD, k_TGD, angles.cos(), angles.sin(), rounding)
    expected = ReferenceOps().rotary(q_THD, k_TGD, angles.cos(), angles.sin(), rounding)
    for turned, reference in zip(found, expected, strict=True):
        assert turned.dtype == BF16
        assert torch.equal(turned, reference)


def every_gate(ops: Ops, up: float) -> Tensor:
    """Return gelu(gate) * up for all bfloat16 numbers as gate, in order of their bits."""
    gates = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(BF16).view(1024, 64)
    return ops.gelu_mul(torch.cat((gates, torch.full_like(gates, up)), dim=1))


def test_gelu_of_every_bfloat16_number_is_torchs_but_where_float32_cancels(
    native: NativeOps,
) -> None:
    """Below -3, 1 + tanh has few digits, so that the last bit of tanh shows."""
    found, expected = (every_gate(ops, -2.0) for ops in (native, ReferenceOps()))
    assert torch.equal(found.isnan(), expected.isnan())
    is_number = ~expected.isnan()
    assert_at_most_a_unit_apart(found[is_number], expected[is_number], tiny=2e-6)


@given(num_rows=rows, size=sizes)
def test_gelu_is_rounded_to_bfloat16_before_the_product(
    native: NativeOps, num_rows: int, size: int
) -> None:
    gate, up = randn(num_rows, size) * 3, randn(num_rows, size, seed=1)
    gated, active = (
        native.gelu_mul(torch.cat((gate, ups), dim=1)) for ups in (up, torch.ones_like(up))
    )
    assert torch.equal(gated, active * up)
