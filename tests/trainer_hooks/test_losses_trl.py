"""Losses, gradients and clip metrics against TRL's trainers, on random batches."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest
from torch.testing import assert_close

from tests.trainer_hooks.loss_batches import random_batch
from tests.trainer_hooks.trl_losses import MAX_LENGTH, our_loss, trl_loss
from trainer_hooks import OffPolicyCorrection, PolicyLossConfig

pytestmark = pytest.mark.skipif(find_spec("trl") is None, reason="needs TRL")
SEEDS = range(3)

KINDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "grpo": ({}, {"loss_type": "grpo", "epsilon_low": 0.2, "epsilon_high": 0.2}),
    "dapo": ({}, {"loss_type": "dapo", "epsilon_low": 0.2, "epsilon_high": 0.28}),
    "ppo": ({}, {"loss_type": "bnpo", "epsilon_low": 0.2, "epsilon_high": 0.2}),
    "dr_grpo": (
        {"max_completion_length": MAX_LENGTH},
        {"loss_type": "dr_grpo", "epsilon_low": 0.2, "epsilon_high": 0.2},
    ),
    "gspo": (
        {},
        {
            "loss_type": "grpo",
            "importance_sampling_level": "sequence",
            "epsilon_low": 3e-4,
            "epsilon_high": 4e-4,
        },
    ),
    "sapo": ({}, {"loss_type": "sapo", "epsilon_low": 0.2, "epsilon_high": 0.2}),
    # TRL's epsilon_high is the cap itself.
    "cispo": ({}, {"loss_type": "cispo", "epsilon_low": 0.2, "epsilon_high": 5.0}),
}


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("kind", KINDS)
def test_kind_equals_trl(kind: str, seed: int) -> None:
    ours, theirs = KINDS[kind]
    batch = random_batch(seed)
    loss, gradient_BT, metrics = our_loss(batch, PolicyLossConfig(kind=kind, **ours))
    inputs = {"old_per_token_logps": batch.behaviour_BT}
    expected, expected_gradient_BT, logged = trl_loss("GRPOTrainer", batch, inputs, **theirs)
    assert_close(loss, expected)
    assert_close(gradient_BT, expected_gradient_BT)
    assert gradient_BT.abs().sum() > 0
    if kind != "gspo":  # there TRL counts rollouts, and we their tokens
        assert "entropy" in logged.keys() & metrics.keys()
        for name in logged.keys() & metrics.keys():
            assert metrics[name] == pytest.approx(logged[name][0], abs=1e-6), name


@pytest.mark.parametrize("seed", SEEDS)
def test_rloo_equals_trl(seed: int) -> None:
    batch = random_batch(seed)
    loss, gradient_BT, _ = our_loss(batch, PolicyLossConfig(kind="rloo"))
    inputs = {"old_logps": (batch.behaviour_BT * batch.mask_BT).sum(dim=1)}
    expected, expected_gradient_BT, _ = trl_loss(
        "RLOOTrainer", batch, inputs, epsilon_low=0.2, epsilon_high=0.2
    )
    assert_close(loss, expected)
    assert_close(gradient_BT, expected_gradient_BT)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("weighted", "delta"), [(False, None), (True, None), (False, 1.6)])
def test_kl_and_dual_clip_equal_trl(seed: int, weighted: bool, delta: float | None) -> None:
    batch = random_batch(seed)
    config = PolicyLossConfig(
        kind="grpo", kl_coefficient=0.3, kl_importance_weighted=weighted, dual_clip=delta
    )
    loss, gradient_BT, metrics = our_loss(batch, config, reference_logprobs_BT=batch.reference_BT)
    expected, expected_gradient_BT, logged = trl_loss(
        "GRPOTrainer",
        batch,
        {"old_per_token_logps": batch.behaviour_BT, "ref_per_token_logps": batch.reference_BT},
        loss_type="grpo",
        epsilon_low=0.2,
        epsilon_high=0.2,
        beta=0.3,
        delta=delta,
        use_bias_correction_kl=weighted,
    )
    assert_close(loss, expected)
    assert_close(gradient_BT, expected_gradient_BT)
    assert metrics["kl"] == pytest.approx(logged["kl"][0], rel=1e-5)


@pytest.mark.parametrize("seed", SEEDS)
def test_entropy_bonus_equals_trl(seed: int) -> None:
    batch = random_batch(seed)
    config = PolicyLossConfig(kind="dapo", entropy_coefficient=0.3)
    loss, gradient_BT, _ = our_loss(batch, config)
    inputs = {"old_per_token_logps": batch.behaviour_BT}
    expected, expected_gradient_BT, _ = trl_loss(
        "GRPOTrainer", batch, inputs, entropy_coef=0.3, **KINDS["dapo"][1]
    )
    assert_close(loss, expected)
    assert_close(gradient_BT, expected_gradient_BT)


@pytest.mark.parametrize("seed", SEEDS)
def test_sequence_masking_equals_trl(seed: int) -> None:
    batch, bound = random_batch(seed, num_rollouts=12), 0.05
    config = PolicyLossConfig(kind="grpo", max_sequence_kl=bound)
    loss, gradient_BT, metrics = our_loss(batch, config)
    assert 0.0 < metrics["sequence_mask_fraction"] < 1.0
    expected, expected_gradient_BT, _ = trl_loss(
        "GRPOTrainer",
        batch,
        {"old_per_token_logps": batch.behaviour_BT},
        off_policy_mask_threshold=bound,
        **KINDS["grpo"][1],
    )
    assert_close(loss, expected)
    assert_close(gradient_BT, expected_gradient_BT)


@pytest.mark.parametrize("mode", ["truncate", "mask"])
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_corrections_equal_trl_given_its_weights(mode: str, level: str) -> None:
    batch, low, high = random_batch(0), 0.6, 1.7
    difference_BT = (batch.proximal_BT - batch.behaviour_BT) * batch.mask_BT
    if level == "sequence":
        difference_BT = difference_BT.sum(dim=1, keepdim=True)
    weight = difference_BT.exp()
    inside = (weight >= low) & (weight <= high)
    weight = weight.clamp(low, high) if mode == "truncate" else weight * inside
    assert not inside.all()
    loss, gradient_BT, _ = our_loss(
        batch,
        PolicyLossConfig(
            correction=OffPolicyCorrection(mode=mode, level=level, low=low, high=high)
        ),
        proximal_logprobs_BT=batch.proximal_BT,
    )
    expected, expected_gradient_BT, _ = trl_loss(
        "GRPOTrainer",
        batch,
        {"old_per_token_logps": batch.proximal_BT, "importance_sampling_ratio": weight},
        **KINDS["dapo"][1],
    )
    assert_close(loss, expected)
    assert_close(gradient_BT, expected_gradient_BT)
