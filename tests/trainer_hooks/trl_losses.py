"""TRL's losses: `_compute_loss` on a stand-in for its trainer that hands it the log-probs."""

from __future__ import annotations

from collections import defaultdict
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import torch

from tests.trainer_hooks.loss_batches import Batch
from trainer_hooks import PolicyLossConfig, policy_loss

MAX_LENGTH = 20
_TRAINERS = {
    "GRPOTrainer": "trl.trainer.grpo_trainer",
    "RLOOTrainer": "trl.trainer.rloo_trainer",
}


class OneProcess:
    """The part of an accelerator that `_compute_loss` uses, for a single process."""

    num_processes = 1
    sync_gradients = True

    def gather(self, values: torch.Tensor) -> torch.Tensor:
        return values

    def reduce(self, values: torch.Tensor, reduction: str) -> torch.Tensor:
        return values


class StandIn(SimpleNamespace):
    """A trainer's settings, with the log-probs that it is to compute."""

    def _get_per_token_logps_and_entropies(self, *_: Any, **__: Any) -> tuple[Any, Any, None]:
        return self.logprobs_BT, self.entropies_BT, None


def trl_loss(
    trainer_name: str, batch: Batch, inputs: dict[str, Any], **settings: Any
) -> tuple[torch.Tensor, torch.Tensor, dict[str, list[float]]]:
    """Return TRL's loss, its gradient to the log-probs, and the metrics it logged.

    `trainer_name` is a key of `_TRAINERS`. Imported here: TRL's trainers take seconds to import.
    """
    trainer = getattr(import_module(_TRAINERS[trainer_name]), trainer_name)
    logprobs_BT = batch.logprobs_BT.clone().requires_grad_()
    stand_in = StandIn(
        logprobs_BT=logprobs_BT,
        entropies_BT=batch.behaviour_BT.abs(),
        accelerator=OneProcess(),
        model=SimpleNamespace(training=True),
        args=SimpleNamespace(
            delta=settings.pop("delta", None),
            use_bias_correction_kl=settings.pop("use_bias_correction_kl", False),
            steps_per_generation=1,
            sapo_temperature_pos=1.0,
            sapo_temperature_neg=1.05,
        ),
        aux_loss_enabled=False,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=settings.pop("off_policy_mask_threshold", None),
        get_off_policy_mask=getattr(trainer, "get_off_policy_mask", None),
        use_adaptive_entropy=False,
        importance_sampling_level=settings.pop("importance_sampling_level", "token"),
        beta=settings.pop("beta", 0.0),
        use_vllm="importance_sampling_ratio" in inputs,
        vllm_importance_sampling_correction=True,
        max_completion_length=MAX_LENGTH,
        current_gradient_accumulation_steps=1,
        entropy_coef=(entropy_coef := settings.pop("entropy_coef", 0.0)),
        _entropy_bonus_enabled=entropy_coef != 0.0,
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
        logprobs_BT,
        batch.behaviour_BT,
        batch.advantages_B1,
        batch.mask_BT,
        config,
        entropies_BT=batch.behaviour_BT.abs(),
        **options,
    )
    loss.backward()
    assert logprobs_BT.grad is not None
    return loss.detach(), logprobs_BT.grad, metrics
