"""Contract of `Ops.fingerprint`: equal to NumPy's uint64, for any dtype and layout."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from rollout.backends.base import Ops
from rollout.backends.ops.fingerprint import EXPONENT_BITS, Places
from tests.contracts.implementations import OPS, is_interpreted
from tests.run_kind import scaled

# The interpreter's casts are NumPy's, which warn.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in cast")

FLOATS = [torch.float32, torch.bfloat16, torch.float16]
UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
SIZES = (1, 2, 7, 4096, 4097, (1 << 16) + 3)
INF, NAN = float("inf"), float("nan")


@pytest.fixture(params=OPS)
def ops(request: pytest.FixtureRequest) -> Ops:
    return OPS[request.param]()


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def unsigned(x: Tensor) -> NDArray[Any]:
    """Return the bits of each element, in the tensor's own memory."""
    return x.view(-1).view(torch.uint8).numpy().view(UNSIGNED[x.itemsize])


def odd(numbers: NDArray[Any]) -> NDArray[Any]:
    """Return SplitMix64's numbers, made odd."""
    z = numbers * np.uint64(0x9E3779B97F4A7C15) + np.uint64(1)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (z ^ (z >> np.uint64(31))) | np.uint64(1)


def hash_of(x: Tensor) -> int:
    """Return the hash by its definition, as a signed number."""
    data = x.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    words = np.frombuffer(data.ljust(-(-len(data) // 4) * 4, b"\0"), dtype="<u4").astype(np.uint64)
    numbers = np.arange(len(words), dtype=np.uint64)
    two, row = np.uint64(2), np.uint64(512)
    with np.errstate(over="ignore"):
        keys = odd(two * (numbers % row)) * odd(two * (numbers // row) + np.uint64(1))
        return int((words * keys).sum(dtype=np.uint64).astype(np.int64))


def assert_as_defined(ops: Ops, x: Tensor, dtype: torch.dtype) -> None:
    fingerprint = ops.fingerprint(x, dtype)
    assert (fingerprint.dtype, fingerprint.shape) == (torch.int64, (2,))
    values = x.detach().to(dtype)
    num_not_finite = int((~torch.isfinite(values)).sum())
    assert fingerprint.tolist() == [hash_of(values), num_not_finite]


@pytest.mark.parametrize("name", OPS)
@given(
    size=st.sampled_from(SIZES),
    dtypes=st.tuples(*[st.sampled_from([*FLOATS, torch.float64])] * 2),
    special=st.lists(st.sampled_from([INF, -INF, -0.0, 1e-40, 1e5, 1e39]), max_size=4),
    seed=st.integers(0, 100),
)
@settings(max_examples=scaled(40))
def test_hash_and_count_are_those_of_the_values_after_the_cast(
    name: str, size: int, dtypes: tuple[torch.dtype, torch.dtype], special: list[float], seed: int
) -> None:
    source, target = dtypes
    x = randn(size, seed=seed, dtype=torch.float64)
    places = torch.randint(size, (len(special),), generator=torch.Generator().manual_seed(seed))
    x[places] = torch.tensor(special, dtype=torch.float64)
    if is_interpreted(name) and torch.bfloat16 in dtypes:
        # The interpreter truncates to bfloat16 where a device rounds, and casts numbers too small
        # to be normal wrongly, both ways: nothing must be left to cut, and none of these.
        x = x.to(torch.bfloat16)
        x[x.abs() < torch.finfo(torch.bfloat16).tiny] = 0.0
    assert_as_defined(OPS[name](), x.to(source), target)


@pytest.mark.parametrize("dtype", [*FLOATS, torch.float64, torch.int64, torch.uint8, torch.bool])
def test_fingerprint_of_no_values_is_zero_for_every_dtype(ops: Ops, dtype: torch.dtype) -> None:
    assert ops.fingerprint(torch.empty(0, 3), dtype).tolist() == [0, 0]
    x = (randn(5, 7) * 3).to(dtype)
    assert ops.fingerprint(x, dtype).tolist() == [hash_of(x), 0]


@pytest.mark.parametrize("num_threads", [1, 3])
def test_more_elements_than_any_implementation_takes_at_once(ops: Ops, num_threads: int) -> None:
    torch.set_num_threads(num_threads)
    x = randn((1 << 20) + 5)
    x[[0, 1 << 19, -1]] = INF
    assert_as_defined(ops, x, torch.float32)
    assert_as_defined(ops, x, torch.float16)


@pytest.mark.parametrize("dtype", FLOATS)
def test_fingerprint_reads_a_view_in_its_own_order(ops: Ops, dtype: torch.dtype) -> None:
    x = randn(40, 30, dtype=dtype)
    for view in (x.T, x[3:, 5:], x[::2], x[1:, ::3], x[7, 3], x[:, :1].expand(40, 9), x[5:7]):
        assert_as_defined(ops, view, dtype)
        assert torch.equal(ops.fingerprint(view, dtype), ops.fingerprint(view.clone(), dtype))


@pytest.mark.parametrize("dtype", FLOATS)
def test_fingerprint_changes_with_every_single_bit(ops: Ops, dtype: torch.dtype) -> None:
    x = randn(100, dtype=dtype)
    bits = unsigned(x)
    hashes = {int(ops.fingerprint(x, dtype)[0])}
    for bit in range(8 * x.itemsize):
        bits[41] ^= 1 << bit
        hashes.add(int(ops.fingerprint(x, dtype)[0]))
        bits[41] ^= 1 << bit
    assert len(hashes) == 8 * x.itemsize + 1


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("places", [(0, 1), (3, 4999), (4095, 4096)])
def test_fingerprint_changes_with_swapped_elements_and_the_sign_of_zero(
    ops: Ops, dtype: torch.dtype, places: tuple[int, int]
) -> None:
    x = randn(5000, dtype=dtype)
    first, second = places
    x[first], x[second] = 0.0, 1.0
    swapped, negative = x.clone(), x.clone()
    swapped[first], swapped[second], negative[first] = 1.0, 0.0, -0.0
    assert len({int(ops.fingerprint(y, dtype)[0]) for y in (x, swapped, negative)}) == 3


@pytest.mark.parametrize("dtype", FLOATS)
def test_nan_and_infinity_are_counted_and_the_largest_number_is_not(
    ops: Ops, dtype: torch.dtype
) -> None:
    x = randn(4500, dtype=dtype)
    x[:7] = torch.tensor([NAN, -NAN, INF, -INF, torch.finfo(dtype).max, torch.finfo(dtype).min, 0])
    x[-1] = NAN
    assert ops.fingerprint(x, dtype).tolist() == [hash_of(x), 5]


@pytest.mark.parametrize(
    ("source", "target", "value"),
    [
        (torch.float32, torch.float16, 1e6),
        (torch.bfloat16, torch.float16, -7e4),
        (torch.float64, torch.float32, 1e39),
        (torch.float64, torch.bfloat16, -1e300),
    ],
)
def test_fingerprint_counts_numbers_that_the_cast_makes_infinite(
    ops: Ops, source: torch.dtype, target: torch.dtype, value: float
) -> None:
    x = torch.ones(9, dtype=source)
    x[4] = value
    assert ops.fingerprint(x, source)[1] == 0
    assert ops.fingerprint(x, target)[1] == 1


def test_a_parameter_with_a_gradient_is_hashed_and_not_changed(ops: Ops) -> None:
    x = torch.nn.Parameter(randn(33, 5))
    before = x.detach().clone()
    assert_as_defined(ops, x, torch.float32)
    assert not ops.fingerprint(x, torch.bfloat16).requires_grad
    assert torch.equal(x, before)


@pytest.mark.parametrize("dtype", EXPONENT_BITS)
def test_exponent_bits_are_those_of_infinity(dtype: torch.dtype) -> None:
    assert EXPONENT_BITS[dtype] == int(unsigned(torch.tensor([INF], dtype=dtype))[0])


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("num_threads", [1, 3])
def test_fingerprints_of_parts_at_their_places_add_up(
    ops: Ops, dtype: torch.dtype, num_threads: int
) -> None:
    torch.set_num_threads(num_threads)
    x = randn(31, 50, 7, dtype=dtype)
    x[3, 40, 2] = x[30, 49, 6] = INF
    for dim, size in enumerate(x.shape):
        parts = (x.narrow(dim, 0, 5), x.narrow(dim, 5, size - 5))
        inner = x.stride(dim)
        places = (
            Places(0, 5 * inner, size * inner),
            Places(5 * inner, (size - 5) * inner, size * inner),
        )
        sums = [ops.fingerprint(part, dtype, p) for part, p in zip(parts, places, strict=True)]
        assert sum(sums).tolist() == [hash_of(x), 2], f"cut in dimension {dim}"
    assert (
        ops.fingerprint(x[:5], dtype, Places(1, 5 * 350, 0))[0] != ops.fingerprint(x[:5], dtype)[0]
    )


@pytest.mark.drawn(16)
@pytest.mark.parametrize("num_threads", [1, 3])
@pytest.mark.parametrize("dtype", [*FLOATS, torch.float64, torch.int64, torch.bool])
def test_copy_with_fingerprint_copies_the_bytes_and_hashes_them(
    ops: Ops, dtype: torch.dtype, num_threads: int
) -> None:
    torch.set_num_threads(num_threads)
    for size in (0, 1, 2, 7, 1023, 4099, (1 << 18) + 5):
        x = (randn(size + 3, seed=size) * 3).to(dtype)[3:]  # at any address
        if size and dtype.is_floating_point:
            x[-1] = INF
        for out in (torch.zeros_like(x), torch.zeros(size + 1, dtype=dtype)[1:]):
            fingerprint = ops.copy_with_fingerprint(out, x)
            assert torch.equal(out, x)
            assert fingerprint.tolist() == ops.fingerprint(x, dtype).tolist()


def test_copy_with_fingerprint_takes_views_and_8_bit_floats(ops: Ops) -> None:
    x = randn(40, 30)
    out = torch.zeros(30, 40)
    assert ops.copy_with_fingerprint(out, x.T).tolist() == [hash_of(x.T), 0]
    assert torch.equal(out, x.T)
    small = x.to(torch.float8_e4m3fn)
    copied = ops.copy_with_fingerprint(torch.zeros_like(small), small)
    assert copied.tolist() == ops.fingerprint(small, torch.float32).tolist()


def test_copy_with_fingerprint_writes_only_out_and_refuses_other_shapes(ops: Ops) -> None:
    x, wide = randn(100, dtype=torch.bfloat16), torch.zeros(116, dtype=torch.bfloat16)
    ops.copy_with_fingerprint(wide[8:108], x)
    assert torch.equal(wide[8:108], x)
    assert not wide[:8].any()
    assert not wide[108:].any()
    with pytest.raises(ValueError, match=r"\[100\] cannot be copied to .*\[116\]"):
        ops.copy_with_fingerprint(wide, x)
    with pytest.raises(ValueError, match=r"float32 .* cannot be copied to torch.bfloat16"):
        ops.copy_with_fingerprint(wide[:100], x.float())


@pytest.mark.gpu
def test_fingerprint_on_a_gpu_does_not_make_the_host_wait() -> None:
    pytest.importorskip("triton")
    from rollout.backends.cuda.ops import TritonOps

    ops, x = TritonOps(), randn(100_003, dtype=torch.bfloat16).cuda()
    ops.fingerprint(x, torch.float16)  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        fingerprint = ops.fingerprint(x, torch.float16)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert fingerprint.is_cuda
    assert fingerprint.tolist() == [hash_of(x.cpu().half()), 0]
    assert torch.equal(ops.fingerprint(x.cpu(), torch.float16), fingerprint.cpu())
