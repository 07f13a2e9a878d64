"""Losses, gradients and clip metrics against TRL's trainers, on random batches.

TRL's `_compute_loss` is called on a stand-in for its trainer that hands it the log-probs.
"""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.testing import assert_close

pytest.importorskip("trl")

from trl.trainer.grpo_trainer import GRPOTrainer
from trl.trainer.rloo_trainer import RLOOTrainer

from tests.trainer_hooks.loss_batches import Batch, random_batch
from trainer_hooks import OffPolicyCorrection, PolicyLossConfig, policy_loss

MAX_LENGTH = 20
SEEDS = range(3)


class OneProcess:
    """What `_compute_loss` asks of an accelerator, for a single process."""

    num_processes = 1

    def gather(self, values: torch.Tensor) -> torch.Tensor:
        return values

    def reduce(self, values: torch.Tensor, reduction: str) -> torch.Tensor:
        return values


class StandIn(SimpleNamespace):
    """A trainer's settings, with the log-probs it is to find."""

    def _get_per_token_logps_and_entropies(self, *_: Any, **__: Any) -> tuple[Any, Any, None]:
        return self.logprobs_BT, torch.zeros_like(self.logprobs_BT), None


def trl_loss(
    trainer: type, batch: Batch, inputs: dict[str, Any], **settings: Any
) -> tuple[torch.Tensor, torch.Tensor, dict[str, list[float]]]:
    """TRL's loss, its gradient to the log-probs, and the metrics it logged."""
    logprobs_BT = batch.logprobs_BT.clone().requires_grad_()
    stand_in = StandIn(
        logprobs_BT=logprobs_BT,
        accelerator=OneProcess(),
        model=SimpleNamespace(training=True),
        args=SimpleNamespace(
            delta=settings.pop("delta", None),
            use_bias_correction_kl=settings.pop("use_bias_correction_kl", False),
            steps_per_generation=1,
        ),
        aux_loss_enabled=False,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        importance_sampling_level=settings.pop("importance_sampling_level", "token"),
        beta=settings.pop("beta", 0.0),
        use_vllm="importance_sampling_ratio" in inputs,
        vllm_importance_sampling_correction=True,
        max_completion_length=MAX_LENGTH,
        current_gradient_accumulation_steps=1,
        _entropy_bonus_enabled=False,
        _metrics={"train": defaultdict(list)},
        **settings,
    )
    ids_BT = torch.zeros(batch.mask_BT.shape, dtype=torch.int64)
    common = {
        "prompt_ids": ids_BT[:, :0],
        "prompt_mask": ids_BT[:, :0],
        "completion_ids": ids_BT,
        "completion_mask": batch.mask_BT.long(),
        "advantages": batch.advantages_B1.flatten(),
        "num_items_in_batch": batch.mask_BT.sum(),
    }
    loss = trainer._compute_loss(stand_in, None, {**common, **inputs})
    loss.backward()
    assert logprobs_BT.grad is not None
    return loss.detach(), logprobs_BT.grad, stand_in._metrics["train"]


def our_loss(
    batch: Batch, config: PolicyLossConfig, **options: Any
) -> tuple[torch.Tensor, torch.Tensor, dict[str, float]]:
    logprobs_BT = batch.logprobs_BT.clone().requires_grad_()
    loss, metrics = policy_loss(
        logprobs_BT, batch.behaviour_BT, batch.advantages_B1, batch.mask_BT, config, **options
    )
    loss.backward()
    assert logprobs_BT.grad is not None
    return loss.detach(), logprobs_BT.grad, metrics


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
    expected, expected_gradient_BT, logged = trl_loss(GRPOTrainer, batch, inputs, **theirs)
    assert_close(loss, expected)
    assert_close(gradient_BT, expected_gradient_BT)
    assert gradient_BT.abs().sum() > 0
    if kind != "gspo":  # there TRL counts rollouts, and we their tokens
        for name in logged.keys() & metrics.keys() - {"entropy"}:
            assert metrics[name] == pytest.approx(logged[name][0], abs=1e-6), name


@pytest.mark.parametrize("seed", SEEDS)
def test_rloo_equals_trl(seed: int) -> None:
    batch = random_batch(seed)
    loss, gradient_BT, _ = our_loss(batch, PolicyLossConfig(kind="rloo"))
    inputs = {"old_logps": (batch.behaviour_BT * batch.mask_BT).sum(dim=1)}
    expected, expected_gradient_BT, _ = trl_loss(
        RLOOTrainer, batch, inputs, epsilon_low=0.2, epsilon_high=0.2
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
        GRPOTrainer,
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
        GRPOTrainer,
        batch,
        {"old_per_token_logps": batch.proximal_BT, "importance_sampling_ratio": weight},
        **KINDS["dapo"][1],
    )
    assert_close(loss, expected)
    assert_close(gradient_BT, expected_gradient_BT)
