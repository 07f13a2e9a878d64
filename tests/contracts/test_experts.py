"""Contract of `Ops.experts` against float64.

An error grows with the terms that are summed, not with their sum: bounds are multiples of the root
of the sum of the terms' squares.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from rollout import InferenceConfig
from rollout.backends.base import ExpertWeights, GatedActivation
from rollout.backends.cpu.experts import run_experts
from rollout.backends.cpu.ops import NativeOps
from rollout.backends.ops.reference import ReferenceOps
from rollout.backends.select import create_backend
from rollout.models import build_model
from tests.contracts.implementations import OPS, is_interpreted, kernels
from tests.contracts.test_ops import computable
from tests.tiny_mixtures import tiny_mixture

ACTIVATIONS = {
    "silu": GatedActivation(),
    "gelu_tanh": GatedActivation(kind="gelu_tanh"),
    "clamped_swiglu": GatedActivation(kind="clamped_swiglu", alpha=1.702, limit=1.5),
}
TOLERANCE = {torch.float32: 3e-6, torch.bfloat16: 2e-2, torch.float16: 4e-3}
LANES = {"compiled": 0, "compiled, vectors of 256 bits": 8}  # even where torch is faster

Experts = Callable[[Tensor, Tensor, Tensor, ExpertWeights], Tensor]
all_ops = pytest.mark.parametrize("name", [*OPS, *LANES])
native = pytest.mark.parametrize("lanes", LANES.values())
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])


def experts_of(name: str) -> Experts:
    if name in LANES:
        return partial(run_experts, kernels(), lanes=LANES[name])
    return OPS[name]().experts


def random_experts(
    num_experts: int, hidden_size: int, expert_size: int, *, dtype: torch.dtype, has_bias: bool
) -> ExpertWeights:
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> Tensor:
        values = torch.randn(num_experts, *shape, generator=generator) * shape[-1] ** -0.5
        return values.to(dtype)

    return ExpertWeights(
        gate_up_NGE=drawn(2 * expert_size, hidden_size) * 2,
        down_NEF=drawn(hidden_size, expert_size),
        gate_up_bias_NG=drawn(2 * expert_size) if has_bias else None,
        down_bias_NE=drawn(hidden_size) if has_bias else None,
    )


def random_tokens(
    num_tokens: int, experts: ExpertWeights, per_token: int, seed: int = 1
) -> tuple[Tensor, Tensor, Tensor]:
    """Return x, and unsorted ids and weights of each token's best random scores."""
    generator = torch.Generator().manual_seed(seed)
    num_experts, hidden_size, _ = experts.down_NEF.shape
    x_TE = torch.randn(num_tokens, hidden_size, generator=generator).to(experts.down_NEF.dtype)
    scores_TN = torch.randn(num_tokens, num_experts, generator=generator).softmax(-1)
    weights_TK, ids_TK = scores_TN.topk(per_token)
    return x_TE, ids_TK, weights_TK


def gated_f64(activation: GatedActivation, gate: Tensor, up: Tensor) -> Tensor:
    if activation.kind == "silu":
        return gate * gate.sigmoid() * up
    if activation.kind == "gelu_tanh":
        inner = (2 / torch.pi) ** 0.5 * (gate + 0.044715 * gate**3)
        return 0.5 * gate * (1 + inner.tanh()) * up
    gate = gate.clamp(max=activation.limit)
    up = up.clamp(-activation.limit, activation.limit)
    return (up + 1) * gate * (activation.alpha * gate).sigmoid()


def experts_f64(
    x_TE: Tensor, ids_TK: Tensor, weights_TK: Tensor, experts: ExpertWeights
) -> tuple[Tensor, Tensor]:
    """(the sums, the root of the sum of their terms' squares), [T, E] both, each token with the
    matrices of its own experts.
    """
    gate_up_TKG = torch.einsum("tkge,te->tkg", experts.gate_up_NGE[ids_TK].double(), x_TE.double())
    if experts.gate_up_bias_NG is not None:
        gate_up_TKG += experts.gate_up_bias_NG[ids_TK]
    gate_TKF, up_TKF = gate_up_TKG.chunk(2, -1)
    active_TKF = gated_f64(experts.activation, gate_TKF, up_TKF)
    down_TKEF, weights_TKE = experts.down_NEF[ids_TK].double(), weights_TK.double()[:, :, None]
    out_TKE = torch.einsum("tkef,tkf->tke", down_TKEF, active_TKF)
    if experts.down_bias_NE is not None:
        out_TKE += experts.down_bias_NE[ids_TK]
    largest_TKF = gate_TKF.abs() * (up_TKF.abs() + 1)  # what an activation's error is relative to
    squares_TKE = torch.einsum("tkef,tkf->tke", down_TKEF.square(), largest_TKF.square())
    squares_TKE += out_TKE.square()
    out_TE = (out_TKE * weights_TKE).sum(1)
    return out_TE, (squares_TKE * weights_TKE.square()).sum(1).sqrt()


@pytest.mark.drawn(5)
@all_ops
@dtypes
@given(
    kind=st.sampled_from([*ACTIVATIONS]),
    num_tokens=st.sampled_from([0, 1, 2, 7, 30, 130]),
    routing=st.sampled_from([(1, 1), (4, 2), (16, 8), (40, 3)]),
    # Whole vectors of 16, of 8, and neither: then torch does it.
    sizes=st.sampled_from([(32, 48), (24, 40), (64, 8), (20, 9)]),
    has_bias=st.booleans(),
)
def test_experts_are_the_weighted_sum_of_each_tokens_experts(
    name: str,
    dtype: torch.dtype,
    kind: str,
    num_tokens: int,
    routing: tuple[int, int],
    sizes: tuple[int, int],
    has_bias: bool,
) -> None:
    if is_interpreted(name):  # at some 10 ms a program
        num_tokens, dtype = min(num_tokens, 2), computable(name, dtype)
    if name in LANES and sizes[0] % 8:
        return
    num_experts, per_token = routing
    experts = random_experts(num_experts, *sizes, dtype=dtype, has_bias=has_bias)
    experts = replace(experts, activation=ACTIVATIONS[kind])
    x_TE, ids_TK, weights_TK = random_tokens(num_tokens, experts, per_token)
    actual_TE = experts_of(name)(x_TE, ids_TK, weights_TK, experts)
    expected_TE, size_TE = experts_f64(x_TE, ids_TK, weights_TK, experts)
    assert actual_TE.dtype == dtype
    assert actual_TE.shape == expected_TE.shape
    assert ((actual_TE.double() - expected_TE).abs() <= TOLERANCE[dtype] * size_TE).all()


def part_of(experts: ExpertWeights, first: int, end: int) -> ExpertWeights:
    """Return the experts [first, end), as one rank has them."""
    biases = experts.gate_up_bias_NG, experts.down_bias_NE
    gate_up_bias_NG, down_bias_NE = (None if bias is None else bias[first:end] for bias in biases)
    return ExpertWeights(
        gate_up_NGE=experts.gate_up_NGE[first:end],
        down_NEF=experts.down_NEF[first:end],
        gate_up_bias_NG=gate_up_bias_NG,
        down_bias_NE=down_bias_NE,
        activation=experts.activation,
        is_part=True,
    )


@all_ops
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("num_tokens", [1, 30])
@pytest.mark.parametrize("num_own", [1, 5])
def test_experts_of_all_ranks_add_up_to_all(
    name: str, has_bias: bool, num_tokens: int, num_own: int
) -> None:
    if is_interpreted(name):
        num_tokens = min(num_tokens, 2)
    experts = random_experts(8, 32, 48, dtype=torch.float32, has_bias=has_bias)
    x_TE, ids_TK, weights_TK = random_tokens(num_tokens, experts, 3)
    total_TE = torch.zeros(x_TE.shape)
    for first, end in ((0, num_own), (num_own, 8)):
        part = part_of(experts, first, end)
        is_here_TK = (ids_TK >= first) & (ids_TK < end)
        own_TK = torch.where(is_here_TK, ids_TK - first, end - first)
        out_TE = experts_of(name)(x_TE, own_TK, weights_TK, part)
        assert not out_TE[~is_here_TK.any(1)].any(), "a token that was sent elsewhere"
        total_TE += out_TE
    expected_TE, size_TE = experts_f64(x_TE, ids_TK, weights_TK, experts)
    assert ((total_TE - expected_TE).abs() <= 2 * TOLERANCE[torch.float32] * size_TE).all()


@native
@dtypes
def test_run_experts_gives_a_token_the_same_bits_in_any_batch(
    lanes: int, dtype: torch.dtype
) -> None:
    experts = random_experts(4, 64, 48, dtype=dtype, has_bias=True)
    tokens = random_tokens(230, experts, 3)
    run = partial(run_experts, kernels(), experts=experts, lanes=lanes)
    together_TE = run(*tokens)
    for start, end in ((0, 1), (5, 7), (9, 12), (20, 24), (30, 47), (60, 160), (101, 230)):
        alone = run(*(part[start:end] for part in tokens))
        assert torch.equal(alone, together_TE[start:end]), (start, end)
    reversed_TE = run(*(part.flip(0) for part in tokens))
    assert torch.equal(reversed_TE.flip(0), together_TE)


@native
def test_it_is_the_same_on_several_threads(lanes: int) -> None:
    experts = random_experts(8, 256, 512, dtype=torch.float32, has_bias=True)
    tokens = random_tokens(20, experts, 4)
    alone = run_experts(kernels(), *tokens, experts, lanes=lanes)
    torch.set_num_threads(3)
    try:
        assert torch.equal(run_experts(kernels(), *tokens, experts, lanes=lanes), alone)
    finally:
        torch.set_num_threads(1)


@native
def test_run_experts_keeps_non_finite_numbers_in_their_token(lanes: int) -> None:
    experts = random_experts(4, 32, 16, dtype=torch.float32, has_bias=False)
    x_TE, ids_TK, weights_TK = random_tokens(9, experts, 2)
    expected_TE = run_experts(kernels(), x_TE, ids_TK, weights_TK, experts, lanes=lanes)
    x_TE[4, 3] = torch.nan
    actual_TE = run_experts(kernels(), x_TE, ids_TK, weights_TK, experts, lanes=lanes)
    assert actual_TE[4].isnan().all()
    others = [token for token in range(9) if token != 4]
    assert torch.equal(actual_TE[others], expected_TE[others])


def test_experts_with_strided_weights_are_computed_by_torch() -> None:
    """Checkpoints in which gates and ups alternate are viewed with such strides."""
    experts = random_experts(4, 32, 16, dtype=torch.float32, has_bias=False)
    apart = torch.empty(4, 32, 64)
    apart[:, :, ::2] = experts.gate_up_NGE
    tokens = random_tokens(9, experts, 2)
    strided = replace(experts, gate_up_NGE=apart[:, :, ::2])
    actual_TE = OPS["native"]().experts(*tokens, strided)
    expected_TE, size_TE = experts_f64(*tokens, experts)
    assert ((actual_TE.double() - expected_TE).abs() <= TOLERANCE[torch.float32] * size_TE).all()


def test_experts_are_computed_by_the_product_chosen_for_their_number_of_tokens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    experts = random_experts(4, 32, 16, dtype=torch.float32, has_bias=False)
    tokens = random_tokens(9, experts, 2)
    monkeypatch.setenv("ROLLOUT_TUNE", "plain")
    ops = NativeOps(kernels())
    plain_TE = ops.experts(*tokens, experts)
    monkeypatch.setenv("ROLLOUT_TUNE", "native")
    native_TE = NativeOps(kernels()).experts(*tokens, experts)
    assert torch.equal(plain_TE, ReferenceOps.experts(ops, *tokens, experts))
    assert torch.equal(native_TE, run_experts(kernels(), *tokens, experts))
    assert not torch.equal(plain_TE, native_TE)


def test_products_of_experts_are_chosen_when_a_model_is_prepared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They are not chosen in the first step, which requests wait for."""
    kernels()  # skips without a compiler
    monkeypatch.setenv("ROLLOUT_TUNE", "native")
    backend, model = (
        create_backend(InferenceConfig(device="cpu", num_threads=1)),
        build_model(tiny_mixture()),
    )
    assert "experts" not in backend.ops.explain()
    model.prepare(backend)
    assert "experts" in backend.ops.explain()
