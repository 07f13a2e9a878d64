"""policy_loss of GRPO against values worked out by hand, its gradients, and its metrics."""

import math
from typing import Any

import pytest
import torch
from torch.testing import assert_close

from rollout.errors import ConfigError
from trainer_hooks import PolicyLossConfig, policy_loss, token_entropies, token_logprobs

NAN = math.nan


def logs(*ratios: float) -> torch.Tensor:
    """Return log-probs of tokens `ratios` times as likely as behaviour log-probs of 0."""
    return torch.tensor([ratios]).log()


def loss_of(ratios: list[float], advantages: list[float], **options: Any) -> float:
    shape = (1, len(ratios))
    loss, _ = policy_loss(
        logs(*ratios), torch.zeros(shape), torch.tensor([advantages]), torch.ones(shape), **options
    )
    return float(loss)


@pytest.mark.parametrize(
    ("ratio", "advantage", "expected"),
    [
        (1.0, 2.0, -2.0),
        (1.1, 1.0, -1.1),
        (1.5, 1.0, -1.28),  # clipped above
        (0.5, 1.0, -0.5),  # the minimum is not the clipped side
        (0.5, -1.0, 0.8),  # clipped below
        (1.5, -1.0, 1.5),
    ],
)
def test_policy_loss_of_one_token(ratio: float, advantage: float, expected: float) -> None:
    assert loss_of([ratio], [advantage]) == pytest.approx(expected, rel=1e-6)


def test_token_mean_weighs_tokens_equally_whatever_the_length_of_their_rollout() -> None:
    mask = torch.tensor([[1, 1, 1], [1, 0, 0]])
    advantages = torch.tensor([[1.0], [5.0]])
    loss, _ = policy_loss(torch.zeros(2, 3), torch.zeros(2, 3), advantages, mask)
    assert float(loss) == pytest.approx(-(3 * 1.0 + 5.0) / 4)


def test_on_policy_gradient_is_minus_the_advantage_over_the_token_count() -> None:
    logprobs = torch.tensor([[-1.0, -2.0]], requires_grad=True)
    loss, metrics = policy_loss(
        logprobs, logprobs.detach(), torch.tensor([[3.0, -1.0]]), torch.ones(1, 2)
    )
    loss.backward()
    assert_close(logprobs.grad, torch.tensor([[-1.5, 0.5]]))
    assert metrics["ratio_mean"] == 1.0
    assert metrics["clip_ratio/region_mean"] == metrics["approx_kl"] == 0.0
    assert metrics["sampled_entropy"] == pytest.approx(1.5)


def test_a_clipped_token_has_no_gradient() -> None:
    logprobs = logs(1.5, 0.5).requires_grad_()
    loss, metrics = policy_loss(
        logprobs, torch.zeros(1, 2), torch.tensor([[1.0, -1.0]]), torch.ones(1, 2)
    )
    loss.backward()
    assert_close(logprobs.grad, torch.zeros(1, 2))
    assert metrics["clip_ratio/region_mean"] == 1.0


def test_proximal_logprobs_are_clipped_around_and_weigh_stale_tokens() -> None:
    # pi / proximal = 1.5 is clipped to 1.28; proximal / behaviour = 1.6 stays below the cap of 2.
    loss, metrics = policy_loss(
        logs(1.5 * 1.6),
        torch.zeros(1, 1),
        torch.ones(1, 1),
        torch.ones(1, 1),
        proximal_logprobs_BT=logs(1.6),
    )
    assert float(loss) == pytest.approx(-1.6 * 1.28, rel=1e-6)
    assert metrics["sampling/importance_sampling_ratio/fraction_above"] == 0.0
    assert metrics["sampling/importance_sampling_ratio/mean"] == pytest.approx(1.6)
    assert metrics["ratio_mean"] == pytest.approx(1.5)


def test_ppo_kl_is_measured_from_the_policy_that_is_clipped_around() -> None:
    # verl's: the mean of old - present log-prob
    arguments = (logs(2.0, 3.0), torch.zeros(1, 2), torch.ones(1, 1), torch.ones(1, 2))
    _, metrics = policy_loss(*arguments)
    assert metrics["ppo_kl"] == pytest.approx(-math.log(6.0) / 2)
    _, metrics = policy_loss(*arguments, proximal_logprobs_BT=logs(2.0, 2.0))
    assert metrics["ppo_kl"] == pytest.approx(-math.log(1.5) / 2)


def test_entropy_metric_is_reported_if_entropies_are_given() -> None:
    tokens = torch.tensor([[0, 1, 0]])
    logits = torch.tensor([[[3.0, 0.0], [0.0, 0.0], [NAN, 0.0]]])
    entropies = token_entropies(logits, temperature=2.0)
    p = torch.tensor([1.5, 0.0]).softmax(-1)
    assert_close(entropies, torch.tensor([[0.0, -(p * p.log()).sum(), math.log(2.0)]]))
    arguments = (token_logprobs(logits, tokens), torch.zeros(1, 3), torch.ones(1, 1))
    mask = torch.tensor([[0, 1, 1]])
    assert "entropy" not in policy_loss(*arguments, mask)[1]
    _, metrics = policy_loss(*arguments, mask, entropies_BT=entropies)
    assert metrics["entropy"] == pytest.approx(float(entropies.sum()) / 2)


def test_truncate_caps_importance_weights_and_reports_their_share() -> None:
    loss, metrics = policy_loss(
        logs(4.0, 1.0),
        torch.zeros(1, 2),
        torch.ones(1, 2),
        torch.ones(1, 2),
        PolicyLossConfig(),
        proximal_logprobs_BT=logs(4.0, 1.0),
    )
    assert float(loss) == pytest.approx(-(2.0 * 1.0 + 1.0) / 2)
    assert metrics["sampling/importance_sampling_ratio/fraction_above"] == 0.5


def test_a_cap_below_one_changes_nothing_without_proximal_logprobs() -> None:
    assert loss_of([1.0], [1.0], config=PolicyLossConfig()) == -1.0


def test_no_gradient_flows_into_proximal_or_behaviour_logprobs() -> None:
    proximal = torch.zeros(1, 1, requires_grad=True)
    behaviour = torch.zeros(1, 1, requires_grad=True)
    logprobs = torch.zeros(1, 1, requires_grad=True)
    loss, _ = policy_loss(
        logprobs, behaviour, torch.ones(1, 1), torch.ones(1, 1), proximal_logprobs_BT=proximal
    )
    loss.backward()
    assert proximal.grad is None
    assert behaviour.grad is None


def test_reference_term_adds_the_weighted_kl_estimate() -> None:
    # ratio reference / policy = 2: k3 = 2 - ln 2 - 1
    options = {"reference_logprobs_BT": logs(2.0)}
    loss = loss_of([1.0], [0.0], config=PolicyLossConfig(kl_coefficient=0.5), **options)
    assert loss == pytest.approx(0.5 * (2.0 - math.log(2.0) - 1.0), rel=1e-6)


def test_lags_add_metrics_and_leave_policy_loss_unchanged() -> None:
    arguments = (logs(1.5, 1.5, 1.0), torch.zeros(1, 3), torch.ones(1, 1), torch.ones(1, 3))
    plain, _ = policy_loss(*arguments)
    loss, metrics = policy_loss(
        *arguments,
        policy_lag_BT=torch.tensor([[2, 0, 1]]),
        kv_lag_BT=torch.tensor([[0.5, 0.0, 1.0]]),
    )
    assert loss == plain
    assert metrics["stale_fraction"] == pytest.approx(2 / 3)
    assert metrics["stale_clip_fraction"] == 0.5
    assert metrics["kv_lag_mean"] == 0.5


def test_policy_loss_refuses_shapes_that_differ_and_a_missing_reference() -> None:
    wide, narrow = torch.zeros(2, 3), torch.zeros(2, 2)
    with pytest.raises(ConfigError, match=r"one shape.*\(2, 2\)"):
        policy_loss(wide, narrow, torch.zeros(2, 1), wide)
    with pytest.raises(ConfigError, match=r"advantages_BT.*\(2,\)"):
        policy_loss(wide, wide, torch.zeros(2), wide)
    with pytest.raises(ConfigError, match="reference_logprobs_BT"):
        policy_loss(wide, wide, wide, wide, PolicyLossConfig(kl_coefficient=0.1))
