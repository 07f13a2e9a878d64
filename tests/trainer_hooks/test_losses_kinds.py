"""Kinds and aggregations of policy_loss against values worked out by hand, with gradients."""

import math
from typing import Any

import pytest
import torch
from torch.testing import assert_close

from trainer_hooks import PolicyLossConfig, policy_loss, value_loss
from trainer_hooks.losses import aggregate


def loss_and_gradient(
    ratios: list[list[float]],
    advantages: list[list[float]],
    mask: list[list[int]] | None = None,
    **fields: Any,
) -> tuple[float, torch.Tensor]:
    """Return policy_loss and its gradient. Behaviour log-probs are 0, so log pi = log ratio."""
    logprobs = torch.tensor(ratios).log().requires_grad_()
    mask_BT = torch.ones(logprobs.shape) if mask is None else torch.tensor(mask)
    loss, _ = policy_loss(
        logprobs,
        torch.zeros(logprobs.shape),
        torch.tensor(advantages),
        mask_BT,
        PolicyLossConfig(**fields),
    )
    loss.backward()
    assert logprobs.grad is not None
    return float(loss.detach()), logprobs.grad


def test_grpo_averages_over_each_rollout_first() -> None:
    loss, gradient = loss_and_gradient(
        [[1.0, 1.0, 1.0], [1.0, 1.0, 1.0]], [[3.0], [5.0]], [[1, 1, 1], [1, 0, 0]], kind="grpo"
    )
    assert loss == pytest.approx(-(3.0 + 5.0) / 2)
    assert_close(gradient, torch.tensor([[-0.5, -0.5, -0.5], [-2.5, 0.0, 0.0]]))


def test_dr_grpo_divides_by_constants_only() -> None:
    loss, gradient = loss_and_gradient(
        [[1.0, 1.0], [1.0, 1.0]],
        [[3.0], [5.0]],
        [[1, 1], [1, 0]],
        kind="dr_grpo",
        max_completion_length=10,
    )
    assert loss == pytest.approx(-(3.0 + 3.0 + 5.0) / (2 * 10))
    assert_close(gradient, torch.tensor([[-0.15, -0.15], [-0.25, 0.0]]))


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "slope"),
    [
        (2.0, -1.0, 2.0, 2.0),  # below c: the usual pessimistic side
        (4.0, -1.0, 3.0, 0.0),  # the dual clip acts
        (4.0, 1.0, -1.2, 0.0),  # the usual clip acts; the dual one is for A < 0
    ],
)
def test_ppo_dual_clip(ratio: float, advantage: float, loss: float, slope: float) -> None:
    value, gradient = loss_and_gradient([[ratio]], [[advantage]], kind="ppo", dual_clip=3.0)
    assert value == pytest.approx(loss)
    assert float(gradient) == pytest.approx(slope)


def test_gspo_clips_the_geometric_mean_of_a_rollout() -> None:
    # s = sqrt(2 * 0.5) = 1 is inside, s = sqrt(1.5 * 1.5) = 1.5 is clipped to 1.0004
    loss, gradient = loss_and_gradient([[2.0, 0.5], [1.5, 1.5]], [[2.0], [2.0]], kind="gspo")
    assert loss == pytest.approx(-(2.0 + 2.0 * 1.0004) / 2)
    assert_close(gradient, torch.tensor([[-0.5, -0.5], [0.0, 0.0]]))


def test_gspo_credits_the_tokens_of_a_rollout_by_their_own_advantages() -> None:
    loss, gradient = loss_and_gradient([[2.0, 0.5]], [[3.0, -1.0]], kind="gspo")
    assert loss == pytest.approx(-1.0)
    assert_close(gradient, torch.tensor([[-1.5, 0.5]]))


def test_rloo_clips_the_product_of_a_rollout() -> None:
    # s = 1.1: d s / d log pi_t = s for each token; s = 2.25 is clipped
    loss, gradient = loss_and_gradient([[2.0, 0.55], [1.5, 1.5]], [[1.0], [1.0]], kind="rloo")
    assert loss == pytest.approx(-(1.1 + 1.2) / 2)
    assert_close(gradient, torch.tensor([[-0.55, -0.55], [0.0, 0.0]]))


def test_cispo_bounds_the_weight_and_keeps_the_gradient() -> None:
    loss, gradient = loss_and_gradient([[10.0, 0.5]], [[1.0]], kind="cispo")
    assert loss == pytest.approx(-(5.0 * math.log(10.0) + 0.5 * math.log(0.5)) / 2, rel=1e-6)
    assert_close(gradient, torch.tensor([[-2.5, -0.25]]))


@pytest.mark.parametrize(
    ("aggregation", "expected"),
    [
        ("token-mean", (1 + 2 + 3 + 10) / 4),
        ("seq-mean-token-sum", (6 + 10) / 2),
        ("seq-mean-token-mean", (2 + 10) / 2),
    ],
)
def test_aggregation_by_hand(aggregation: Any, expected: float) -> None:
    values = torch.tensor([[1.0, 2.0, 3.0], [10.0, 0.0, 0.0], [0.0, 0.0, 0.0]])
    mask = torch.tensor([[1, 1, 1], [1, 0, 0], [0, 0, 0]]).bool()
    assert float(aggregate(values, mask, aggregation)) == pytest.approx(expected)


def test_value_loss_clips_values_near_the_old_ones() -> None:
    # V - R: 1 - 0 free; 0.5 from old 0, clipped to 0.2: max(0.25, 0.64) / 2, no gradient
    values = torch.tensor([[1.0, 0.5, math.nan]], requires_grad=True)
    loss, metrics = value_loss(
        values,
        torch.tensor([[1.0, 0.0, math.nan]]),
        torch.tensor([[0.0, 1.0, math.nan]]),
        torch.tensor([[1, 1, 0]]),
    )
    loss.backward()
    assert float(loss.detach()) == pytest.approx((1.0 + 0.64) / 4)
    assert_close(values.grad, torch.tensor([[0.5, 0.0, 0.0]]))
    assert metrics["vf_clipfrac"] == 0.5
    assert metrics["vpred_mean"] == pytest.approx(0.75)


def test_value_loss_without_a_clip_is_half_the_squared_error() -> None:
    values = torch.tensor([[1.0, 3.0]])
    loss, _ = value_loss(
        values, torch.zeros(1, 2), torch.zeros(1, 2), torch.ones(1, 2), clip_range=None
    )
    assert float(loss) == pytest.approx((1.0 + 9.0) / 4)
