"""Contract of Product, a CPU's matrix product, over every product of this machine."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from rollout.backends.cpu.kernels import Kernels
from rollout.backends.cpu.library import load_library
from rollout.backends.cpu.linear_ops import CpuOps
from rollout.backends.cpu.native_weight import packed_bytes
from rollout.backends.cpu.products import BUCKETS, LinearHandle, ProductRule, available_products
from tests.contracts.implementations import prepared_handle

PRODUCTS = ("plain", "onednn", "mkl", "native-256", "native-512", "native-dot", "native-amx")

PAIRED = ("native-dot", "native-amx")  # which round x to bfloat16

all_products = pytest.mark.parametrize("name", PRODUCTS)


def ops_with(name: str) -> CpuOps:
    """Return the operations with this product forced; skips the test if it does not exist."""
    library = load_library() if name.startswith("native") else None
    products = available_products(None if library is None else Kernels(library))
    if name not in [product.name for product in products]:
        pytest.skip(f"no {name} on this machine")
    return CpuOps(ProductRule(products, name))


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def assert_product(ops: CpuOps, x: Tensor, weight: Tensor, handle: LinearHandle) -> None:
    expected = x.double() @ weight.double().T
    torch.testing.assert_close(ops.linear(x, handle).double(), expected, rtol=1e-5, atol=1e-4)


@all_products
@given(
    num_rows=st.sampled_from([0, 1, 2, 3, 4, 5, 7, 8, 16, 31, 64, 128, 129, 300]),
    has_bias=st.booleans(),
    num_inputs=st.sampled_from([1, 8, 33, 48, 160]),
    num_outputs=st.sampled_from([1, 2, 7, 8, 41, 257]),
)
def test_products_multiply_with_the_transposed_weight(
    name: str, num_rows: int, has_bias: bool, num_inputs: int, num_outputs: int
) -> None:
    ops = ops_with(name)
    weight, bias = randn(num_outputs, num_inputs), randn(num_outputs, seed=1)
    x = randn(num_rows, num_inputs, seed=2)
    handle = prepared_handle(ops, weight, bias if has_bias else None)
    expected = x.double() @ weight.double().T + (bias.double() if has_bias else 0)
    result = ops.linear(x, handle)
    assert result.shape == (num_rows, num_outputs)
    torch.testing.assert_close(result.double(), expected, rtol=1e-5, atol=1e-4)


@all_products
@pytest.mark.parametrize("num_rows", [1, 6, 40])
def test_products_take_strided_rows_and_columns(name: str, num_rows: int) -> None:
    ops, weight = ops_with(name), randn(24, 32)
    handle = prepared_handle(ops, weight)
    assert_product(ops, randn(num_rows, 40)[:, :32], weight, handle)
    assert_product(ops, randn(32, num_rows).T, weight, handle)


@all_products
def test_products_follow_an_update_and_its_undo(name: str) -> None:
    ops, weight, x = ops_with(name), randn(24, 32), randn(5, 32, seed=1)
    old, new = weight.clone(), randn(24, 32, seed=2)
    handle = prepared_handle(ops, weight)
    staged = ops.stage(handle, [new[:10], new[10:]], packed_bytes)
    assert_product(ops, x, old, handle)
    before = ops.packed(handle)
    weight.copy_(new)
    ops.refresh(handle, staged)
    assert_product(ops, x, new, handle)
    if before is not None:
        assert torch.equal(ops.unpack(before), old)
    weight.copy_(old)
    ops.refresh(handle, before)
    assert_product(ops, x, old, handle)


@all_products
def test_release_drops_the_packed_copy_until_refresh(name: str) -> None:
    ops, weight, x = ops_with(name), randn(24, 32), randn(5, 32, seed=1)
    handle = prepared_handle(ops, weight)
    ops.release(handle)
    assert ops.packed(handle) is None
    weight.mul_(3)
    assert_product(ops, x, weight, handle)
    ops.refresh(handle)
    assert_product(ops, x, weight, handle)


@all_products
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_products_leave_unsupported_dtypes_to_torch(name: str, dtype: torch.dtype) -> None:
    ops, weight, x = ops_with(name), randn(24, 32).to(dtype), randn(5, 32, seed=1).to(dtype)
    result = ops.linear(x, prepared_handle(ops, weight))
    assert result.dtype == dtype
    expected = x.double() @ weight.double().T
    torch.testing.assert_close(result.double(), expected, rtol=0.02, atol=0.05)


@pytest.mark.parametrize("name", ["native-256", "native-512", "native-dot", "native-amx"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_native_products_give_a_row_the_same_bits_in_any_batch(
    name: str, dtype: torch.dtype
) -> None:
    ops, weight = ops_with(name), randn(300, 96).to(dtype)
    handle = prepared_handle(ops, weight, randn(300, seed=1).to(dtype))
    x = randn(400, 96, seed=2).to(dtype)
    together = ops.linear(x, handle)
    if name in PAIRED and dtype == torch.float32:
        assert handle.packed is None, "it is for bfloat16 alone"
        return
    for num_rows in (1, 2, 3, 4, 5, 6, 7, 12, 13, 25, 64, 333):
        assert torch.equal(ops.linear(x[:num_rows], handle), together[:num_rows]), num_rows


@pytest.mark.parametrize("name", ["native-256", "native-512", "native-dot", "native-amx"])
@given(
    num_rows=st.sampled_from([0, 1, 15, 16, 17, 32, 33, 513]),
    has_bias=st.booleans(),
    num_inputs=st.sampled_from([1, 31, 32, 33, 64, 95, 160, 257]),
    num_outputs=st.sampled_from([1, 15, 31, 32, 33, 300]),
)
def test_bfloat16_is_multiplied_exactly_and_rounded_once(
    name: str, num_rows: int, has_bias: bool, num_inputs: int, num_outputs: int
) -> None:
    """The bound is half a unit of bfloat16's last place, plus the rounding of float32 sums."""
    ops = ops_with(name)
    weight, bias = randn(num_outputs, num_inputs).bfloat16(), randn(num_outputs, seed=1).bfloat16()
    x = randn(num_rows, num_inputs, seed=2).bfloat16()
    handle = prepared_handle(ops, weight, bias if has_bias else None)
    assert handle.packed is not None
    expected = x.double() @ weight.double().T + (bias.double() if has_bias else 0)
    result = ops.linear(x, handle).double()
    torch.testing.assert_close(result, expected, rtol=2**-8, atol=1e-4)


@pytest.mark.parametrize("name", PAIRED)
def test_dot_and_amx_round_x_to_nearest_even_and_keep_nan(name: str) -> None:
    """2^-10 is lost beside 1; a tie goes to the even neighbour."""
    ops = ops_with(name)
    handle = prepared_handle(ops, torch.tensor([[1.0, 1.0]]).bfloat16())
    x = torch.tensor(
        [[1 + 2**-10, -1], [1 + 3 * 2**-8, -1], [1 + 2**-8, -1], [float("nan"), 0], [1e38, 1e38]]
    )
    values = ops.linear(x, handle).flatten().tolist()
    assert values[:3] == [0.0, 2**-6, 0.0]
    assert math.isnan(values[3])
    assert values[4] == pytest.approx(2e38, rel=0.01)


@all_products
def test_it_is_the_same_on_several_threads(name: str) -> None:
    weight, x = randn(3000, 512), randn(6, 512, seed=1)
    ops = ops_with(name)
    handle = prepared_handle(ops, weight)
    alone = ops.linear(x, handle)
    torch.set_num_threads(3)
    try:
        torch.testing.assert_close(ops.linear(x, handle), alone, rtol=1e-5, atol=1e-4)
    finally:
        torch.set_num_threads(1)


# ---- weights packed in their own memory

native_products = pytest.mark.parametrize("name", ["native-256", "native-512"])


@pytest.mark.parametrize("name", PAIRED)
def test_products_of_one_layout_share_the_packed_weight(name: str) -> None:
    """AMX serves many rows, and vectors serve a few."""
    ops, weight = ops_with(name), randn(96, 64).bfloat16()
    products = {p.name: p for p in available_products(Kernels(load_library()))}
    pairs, vectors = products[name], products["native-512"]
    address = weight.data_ptr()
    handle = ops.prepare_linear(weight, may_repack=True)
    handle.use([vectors if rows <= 4 else pairs for rows in BUCKETS])
    packed = ops.repacked(handle)
    assert packed is not None
    assert packed.address(0) == address
    for num_rows in (1, 40):
        x = randn(num_rows, 64, seed=1).bfloat16()
        expected = x.double() @ packed.read(0, 96).double().T
        result = ops.linear(x, handle).double()
        torch.testing.assert_close(result, expected, rtol=2**-8, atol=1e-4)


both_dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


def repacked_handle(ops: CpuOps, weight: Tensor, bias: Tensor | None = None) -> LinearHandle:
    handle = ops.prepare_linear(weight, bias, may_repack=True)
    ops.choose_products([handle])
    return handle


@native_products
@both_dtypes
def test_a_weight_packed_in_its_own_memory_gives_the_bits_of_a_packed_copy(
    name: str, dtype: torch.dtype
) -> None:
    ops, weight, bias = ops_with(name), randn(320, 96).to(dtype), randn(320, seed=1).to(dtype)
    values, address = weight.clone(), weight.data_ptr()
    with_copy = prepared_handle(ops, values, bias)
    handle = repacked_handle(ops, weight, bias)
    repacked = ops.repacked(handle)
    assert repacked is not None
    assert repacked.address(0) == weight.data_ptr() == address
    assert torch.equal(repacked.read(0, 320), values)
    for num_rows in (0, 1, 3, 12, 64, 300):
        x = randn(num_rows, 96, seed=num_rows).to(dtype)
        assert torch.equal(ops.linear(x, handle), ops.linear(x, with_copy)), num_rows


@native_products
@both_dtypes
def test_a_repacked_weight_follows_an_update_and_its_undo(name: str, dtype: torch.dtype) -> None:
    ops, weight, x = ops_with(name), randn(96, 33).to(dtype), randn(5, 33, seed=1).to(dtype)
    old, new = weight.clone(), randn(96, 33, seed=2).to(dtype)
    handle = repacked_handle(ops, weight)
    repacked = ops.repacked(handle)
    assert repacked is not None
    before, address = ops.linear(x, handle), weight.data_ptr()
    staged = ops.stage(handle, [new[:20], new[20:]], packed_bytes)
    repacked.undo(staged)  # nothing was taken yet
    assert torch.equal(ops.linear(x, handle), before)
    ops.refresh(handle, staged)
    assert torch.equal(repacked.read(0, 96), new)
    assert not torch.equal(ops.linear(x, handle), before)
    for _ in range(2):  # the second time there is nothing to undo
        repacked.undo(staged)
        assert torch.equal(repacked.read(0, 96), old)
    assert torch.equal(ops.linear(x, handle), before)
    assert weight.data_ptr() == address


@native_products
def test_a_repacked_weight_stays_when_packed_copies_are_dropped(name: str) -> None:
    ops, weight, x = ops_with(name), randn(96, 33), randn(5, 33, seed=1)
    handle = repacked_handle(ops, weight)
    before = ops.linear(x, handle)
    ops.release(handle)
    assert ops.packed(handle) is None
    assert torch.equal(ops.linear(x, handle), before)


@native_products
def test_a_repacked_weight_may_move(name: str) -> None:
    ops, weight, x = ops_with(name), randn(96, 33), randn(5, 33, seed=1)
    handle = repacked_handle(ops, weight)
    before, panels = ops.linear(x, handle), weight.data
    weight.data = torch.empty(0)
    weight.data = panels.clone()
    ops.refresh(handle)
    assert torch.equal(ops.linear(x, handle), before)


@native_products
def test_unpack_restores_the_order_of_rows(name: str) -> None:
    ops, weight = ops_with(name), randn(96, 33)
    values = weight.clone()
    repacked = ops.repacked(repacked_handle(ops, weight))
    assert repacked is not None
    assert weight.shape != values.shape
    assert torch.equal(repacked.gather(torch.tensor([95, 0, 17])), values[[95, 0, 17]])
    repacked.unpack()
    assert torch.equal(weight, values)


@all_products
def test_a_weight_that_does_not_fill_panels_or_may_not_be_repacked_is_copied(name: str) -> None:
    ops = ops_with(name)
    for weight, may_repack in ((randn(95, 33), True), (randn(96, 33), False)):
        values = weight.clone()
        handle = ops.prepare_linear(weight, may_repack=may_repack)
        ops.choose_products([handle])
        assert ops.repacked(handle) is None
        assert torch.equal(weight, values)


@native_products
def test_exchanging_on_several_threads_is_the_same(name: str) -> None:
    ops, weight, new = ops_with(name), randn(3200, 257), randn(3200, 257, seed=1)
    handle = repacked_handle(ops, weight)
    torch.set_num_threads(3)
    try:
        ops.refresh(handle, ops.stage(handle, [new], packed_bytes))
    finally:
        torch.set_num_threads(1)
    repacked = ops.repacked(handle)
    assert repacked is not None
    assert torch.equal(repacked.read(0, 3200), new)
