"""KL estimators over all tokens of small distributions: which averages are exact, which are not."""

import math
from typing import Any

import pytest
import torch
from torch.testing import assert_close

from trainer_hooks import PolicyLossConfig, kl_estimate, policy_loss, token_rewards

LOGITS = torch.tensor([0.3, -0.9, 1.1, 0.0])
REFERENCE = torch.tensor([0.5, 0.6, -0.2, -0.4]).log_softmax(0)
OLDER = torch.tensor([0.1, -0.2, 0.4, 0.3]).log_softmax(0)


def exact_gradient(reverse: bool = True) -> torch.Tensor:
    """Return the gradient to the logits of KL(pi || reference), or of KL(reference || pi)."""
    logits = LOGITS.clone().requires_grad_()
    log_pi = logits.log_softmax(0)
    kl = (log_pi.exp() * (log_pi - REFERENCE)).sum()
    if not reverse:
        kl = (REFERENCE.exp() * (REFERENCE - log_pi)).sum()
    return torch.autograd.grad(kl, logits)[0]


def expected_gradient(behaviour: torch.Tensor, estimator: Any, weighted: bool) -> torch.Tensor:
    """Return the gradient of policy_loss's KL term to the logits, averaged over `behaviour`."""
    logits = LOGITS.clone().requires_grad_()
    gradients = []
    for token in range(len(LOGITS)):
        loss, _ = policy_loss(
            logits.log_softmax(0)[token].view(1, 1),
            behaviour[token].view(1, 1),
            torch.zeros(1, 1),
            torch.ones(1, 1),
            PolicyLossConfig(
                kl_coefficient=1.0, kl_estimator=estimator, kl_importance_weighted=weighted
            ),
            reference_logprobs_BT=REFERENCE[token].view(1, 1),
        )
        gradients.append(torch.autograd.grad(loss, logits)[0])
    return behaviour.exp() @ torch.stack(gradients)


def test_k1_and_k3_average_to_the_divergence_and_k2_does_not() -> None:
    log_pi = LOGITS.log_softmax(0)
    divergence = (log_pi.exp() * (log_pi - REFERENCE)).sum()
    means = {
        name: (log_pi.exp() * kl_estimate(log_pi, REFERENCE, name)).sum()  # type: ignore[arg-type]
        for name in ("k1", "k2", "k3")
    }
    assert_close(means["k1"], divergence)
    assert_close(means["k3"], divergence)
    assert abs(float(means["k2"] - divergence)) > 0.01


def test_as_a_loss_k2_is_unbiased_and_k3_follows_the_other_divergence() -> None:
    behaviour = LOGITS.log_softmax(0)
    assert_close(expected_gradient(behaviour, "k2", weighted=False), exact_gradient())
    k3 = expected_gradient(behaviour, "k3", weighted=False)
    assert_close(k3, exact_gradient(reverse=False))
    assert (k3 - exact_gradient()).abs().max() > 0.01


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
@pytest.mark.parametrize("behaviour", [LOGITS.log_softmax(0), OLDER], ids=["on", "off"])
def test_importance_weighted_all_are_unbiased_for_tokens_of_any_policy(
    estimator: str, behaviour: torch.Tensor
) -> None:
    assert_close(expected_gradient(behaviour, estimator, weighted=True), exact_gradient())


@pytest.mark.parametrize(("estimator", "is_unbiased"), [("k1", True), ("k2", False), ("k3", False)])
def test_in_the_reward_only_k1_is_unbiased(estimator: Any, is_unbiased: bool) -> None:
    logits = LOGITS.clone().requires_grad_()
    log_pi = logits.log_softmax(0)
    rewards = token_rewards(
        torch.zeros(4), log_pi[:, None], REFERENCE[:, None], torch.ones(4, 1), 1.0, estimator
    )
    gain = (log_pi.detach().exp() * rewards[:, 0] * log_pi).sum()
    gradient = -torch.autograd.grad(gain, logits)[0]
    assert torch.allclose(gradient, exact_gradient(), atol=1e-6) == is_unbiased


def test_every_token_pays_its_kl_and_the_last_one_earns_the_reward() -> None:
    rewards = token_rewards(
        torch.tensor([1.0, math.nan]),
        torch.tensor([[math.nan, -1.0, -2.0, 9.0], [0.0, 0.0, 0.0, 0.0]]),
        torch.tensor([[0.0, -1.5, -1.0, 9.0], [0.0, 0.0, 0.0, 0.0]]),
        torch.tensor([[0, 1, 1, 0], [0, 0, 0, 0]]),
        kl_coefficient=0.1,
    )
    assert_close(rewards[0], torch.tensor([0.0, -0.05, 0.1 + 1.0, 0.0]))
    assert rewards[1].isnan().tolist() == [True, False, False, False]
