"""Router against its definition, token by token, and MixtureOfExperts."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor
from torch.testing import assert_close

from rollout.backends.base import ExpertWeights, GatedActivation
from rollout.backends.ops import routed_experts
from rollout.backends.ops.reference import ReferenceOps
from rollout.backends.ops.routed_experts import every_expert, grouped, looped
from rollout.layers.experts import MixtureOfExperts, MoeNames, MoeSpec, Router, RouterSpec
from tests.models.oracle_backend import oracle_backend

CPU = torch.device("cpu")
HIDDEN_SIZE = 5
PLAIN = RouterSpec(
    num_experts=12,
    experts_per_token=3,
    scores="softmax",
    normalizes=False,
    scale=1.0,
    has_correction=False,
    num_groups=1,
    num_chosen_groups=1,
    has_bias=False,
    is_float32=False,
)
Vector = NDArray[np.float64]


def softmax(values: Vector) -> Vector:
    powers: Vector = np.exp(values - values.max())
    return powers / powers.sum()


def is_tied(values: Vector) -> bool:
    """Return whether rounding might change the order of two values."""
    return len(values) > 1 and float(np.diff(np.sort(values)).min()) < 1e-5


def route(logits: Vector, correction: Vector, spec: RouterSpec) -> dict[int, float] | None:
    """Return one token's experts and their weights; None if rounding may choose others."""
    if spec.scores == "softmax_chosen":
        chosen = np.argsort(-logits)[: spec.experts_per_token]
        return None if is_tied(logits) else dict(zip(chosen, softmax(logits[chosen]), strict=True))
    scores = softmax(logits) if spec.scores == "softmax" else 1 / (1 + np.exp(-logits))
    rated = scores + correction
    groups = np.arange(spec.num_experts).reshape(spec.num_groups, -1)
    ratings = np.array([np.sort(rated[group])[-2:].sum() for group in groups])
    if is_tied(rated) or is_tied(ratings):
        return None
    allowed = groups[np.argsort(-ratings)[: spec.num_chosen_groups]].flatten()
    chosen = allowed[np.argsort(-rated[allowed])][: spec.experts_per_token]
    total = scores[chosen].sum() if spec.normalizes else 1.0
    return dict(zip(chosen, spec.scale * scores[chosen] / total, strict=True))


@given(
    kind=st.sampled_from(["softmax", "softmax_chosen", "sigmoid"]),
    groups=st.sampled_from([(1, 1), (3, 1), (4, 2), (6, 3)]),
    flags=st.tuples(*[st.booleans()] * 4),
    num_tokens=st.sampled_from([0, 1, 7]),
    seed=st.integers(0, 2**32 - 1),
)
def test_a_router_chooses_and_weighs_as_defined(
    kind: str, groups: tuple[int, int], flags: tuple[bool, ...], num_tokens: int, seed: int
) -> None:
    normalizes, has_correction, has_bias, is_float32 = flags
    is_sigmoid = kind == "sigmoid"
    spec = replace(
        PLAIN,
        scores=kind,
        normalizes=normalizes,
        scale=2.5 if is_sigmoid else 1.0,
        has_correction=has_correction and is_sigmoid,
        num_groups=groups[0] if is_sigmoid else 1,
        num_chosen_groups=groups[1] if is_sigmoid else 1,
        has_bias=has_bias,
        is_float32=is_float32,
    )
    generator = torch.Generator().manual_seed(seed)
    router = Router(HIDDEN_SIZE, spec, dtype=torch.float32, device=CPU)
    for parameter in router.parameters():
        parameter.normal_(generator=generator)
    x_TE = torch.randn(num_tokens, HIDDEN_SIZE, generator=generator)
    correction_N = torch.randn(spec.num_experts, generator=generator) * spec.has_correction
    ids_TK, weights_TK = router(x_TE, correction_N if spec.has_correction else None)
    assert (ids_TK.dtype, weights_TK.dtype) == (torch.int64, torch.float32)
    logits_TN = x_TE.double() @ router.weight.double().T
    if router.bias is not None:
        logits_TN += router.bias
    for row, logits in enumerate(logits_TN.numpy()):
        expected = route(logits, correction_N.double().numpy(), spec)
        routed = dict(zip(ids_TK[row].tolist(), weights_TK[row].tolist(), strict=True))
        assert expected is None or routed == pytest.approx(expected, rel=1e-4, abs=1e-6)


def test_a_bfloat16_router_in_float32_rounds_no_logit() -> None:
    router = Router(2, replace(PLAIN, is_float32=True), dtype=torch.bfloat16, device=CPU)
    router.weight.zero_()
    # In bfloat16 both logits would be 1.
    router.weight[4], router.weight[9] = torch.tensor([1.0, 0.0]), torch.tensor([1.0, 2.0**-12])
    ids_TK, _ = router(torch.ones(1, 2, dtype=torch.bfloat16), None)
    assert ids_TK[0, :2].tolist() == [9, 4]


class Batch:
    """The only field of a batch that a mixture uses."""

    def __init__(self, routing_TLK: Tensor | None) -> None:
        self.routing_TLK = routing_TLK


def test_a_mixture_writes_its_choice_to_its_part_of_routing() -> None:
    spec = MoeSpec(
        moe_index=1,
        router=PLAIN,
        expert_size=4,
        activation=GatedActivation(),
        has_expert_bias=False,
        shared=None,
        names=MoeNames(),
    )
    mixture = MixtureOfExperts(HIDDEN_SIZE, spec, dtype=torch.float32, device=CPU)
    for parameter in mixture.parameters():
        parameter.normal_()
    mixture.bind(replace(oracle_backend(), ops=ReferenceOps()))
    x_TE = torch.randn(6, HIDDEN_SIZE)
    routing_TLK = torch.full((6, 3, PLAIN.experts_per_token), -1, dtype=torch.int16)
    out_TE = mixture(x_TE, Batch(routing_TLK))
    ids_TK, _ = mixture.parts.router(x_TE, None)
    assert torch.equal(routing_TLK[:, 1].long(), ids_TK)
    assert (routing_TLK[:, [0, 2]] == -1).all()
    assert torch.equal(mixture(x_TE, Batch(None)), out_TE)


@pytest.mark.parametrize("has_bias", [False, True])
def test_the_grouped_product_is_that_of_the_loop(has_bias: bool) -> None:
    """We use the grouped product on GPUs only, but torch also has it on a CPU."""
    ids_A = torch.tensor([0, 0, 3, 4, 4, 4, 6])  # of 8: several, one or no row of an expert
    x_AE, weight_NFE = torch.randn(7, 8), torch.randn(8, 12, 8)
    bias_NF = torch.randn(8, 12) if has_bias else None
    expected_AF = looped(ids_A, 8)(x_AE, weight_NFE, bias_NF)
    assert_close(grouped(ids_A, 8)(x_AE, weight_NFE, bias_NF), expected_AF)
    for row, expert in enumerate(ids_A.tolist()):
        own_F = weight_NFE[expert] @ x_AE[row] + (0 if bias_NF is None else bias_NF[expert])
        assert_close(expected_AF[row], own_F)


@pytest.mark.parametrize("has_bias", [False, True])
def test_every_expert_gives_the_sum_of_the_chosen(has_bias: bool) -> None:
    """Graphs need it where there is no grouped product. An expert that is not chosen overflows."""
    num_experts, size = 6, 4
    biases = (torch.randn(num_experts, 2 * size), torch.randn(num_experts, HIDDEN_SIZE))
    gate_up_bias_NG, down_bias_NE = biases if has_bias else (None, None)
    experts = ExpertWeights(
        gate_up_NGE=torch.randn(num_experts, 2 * size, HIDDEN_SIZE),
        down_NEF=torch.randn(num_experts, HIDDEN_SIZE, size),
        gate_up_bias_NG=gate_up_bias_NG,
        down_bias_NE=down_bias_NE,
    )
    experts.gate_up_NGE[5] = torch.inf
    x_TE, ids_TK = torch.randn(3, HIDDEN_SIZE), torch.tensor([[0, 2], [4, 0], [3, 1]])
    weights_TK = torch.rand(3, 2)
    expected_TE = ReferenceOps().experts(x_TE, ids_TK, weights_TK, experts)
    actual_TE = every_expert(
        *(x_TE, ids_TK, weights_TK, experts), lambda _, gate_up: ReferenceOps().silu_mul(gate_up)
    )
    assert_close(actual_TE, expected_TE)


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("way", ["grouped", "every expert"])
def test_parts_of_the_experts_add_up_as_a_gpu_computes_them(
    way: str, has_bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank's tokens that go to another rank have the id after its last expert."""
    monkeypatch.setattr(routed_experts, "can_group", lambda *_: way == "grouped")
    run = routed_experts.every_expert if way == "every expert" else routed_experts.routed_experts
    num_experts, size, hidden_size = 6, 4, 8  # rows of 16 bytes at least
    stacks = {
        "gate_up_NGE": torch.randn(num_experts, 2 * size, hidden_size),
        "down_NEF": torch.randn(num_experts, hidden_size, size),
    }
    if has_bias:
        stacks["gate_up_bias_NG"] = torch.randn(num_experts, 2 * size)
        stacks["down_bias_NE"] = torch.randn(num_experts, hidden_size)
    x_TE, weights_TK = torch.randn(4, hidden_size), torch.rand(4, 2)
    ids_TK = torch.tensor([[0, 2], [5, 0], [3, 4], [1, 5]])

    def gate(_: GatedActivation, gate_up: Tensor) -> Tensor:
        return ReferenceOps().silu_mul(gate_up)

    total_TE = torch.zeros(4, hidden_size)
    for start, end in ((0, 3), (3, 6)):
        part = {name: stack[start:end] for name, stack in stacks.items()}
        own_TK = torch.where((ids_TK >= start) & (ids_TK < end), ids_TK - start, end - start)
        total_TE += run(x_TE, own_TK, weights_TK, ExpertWeights(**part, is_part=True), gate)
    expected_TE = ReferenceOps().experts(x_TE, ids_TK, weights_TK, ExpertWeights(**stacks))
    assert_close(total_TE, expected_TE)
