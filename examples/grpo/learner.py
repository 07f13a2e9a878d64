"""One GRPO training step on a batch of rollouts.

Shape letters: B rollouts, T positions, P prompts, G rollouts per prompt.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean

import torch
from transformers import PreTrainedModel

from examples.grpo.reference import load_reference
from examples.grpo.settings import AlgorithmSettings, JobSettings, TrainerSettings
from trainer_hooks import (
    RolloutBatch,
    group_advantages,
    has_reward_spread,
    policy_loss,
    token_entropies,
    token_logprobs,
)


class GrpoLearner:
    """Owns the optimizer of `policy` and changes its weights, in place.

    `reference`: what the KL term of the loss, if it has one, holds the policy near.
    """

    def __init__(
        self,
        policy: PreTrainedModel,
        algorithm: AlgorithmSettings,
        trainer: TrainerSettings,
        reference: PreTrainedModel | None = None,
    ) -> None:
        self.policy = self.saved = policy
        self.reference = reference
        self._algorithm = algorithm
        self._trainer = trainer
        self.optimizer = torch.optim.AdamW(
            policy.parameters(), lr=trainer.learning_rate, betas=trainer.betas, weight_decay=0.0
        )

    def update(self, batch: RolloutBatch, step: int) -> dict[str, float]:
        """Train on the groups whose rewards differ, in minibatches; returns `train/*` metrics.

        The rows of `batch` are groups in turn; `step` counts from 1 and sets the learning rate.
        """
        group_size = self._algorithm.group_size
        rewards_PG = self._training_rewards(batch).view(-1, group_size)
        advantages_PG = group_advantages(
            rewards_PG,
            self._algorithm.advantage_normalization,
            self._algorithm.advantage_baseline,
        )
        advantages_B = advantages_PG.flatten()
        kept_B = has_reward_spread(rewards_PG).repeat_interleave(group_size)
        learning_rate = learning_rate_at(step, self._trainer)
        for parameter_group in self.optimizer.param_groups:
            parameter_group["lr"] = learning_rate
        order = kept_B.nonzero().flatten()
        order = order[torch.randperm(len(order))]
        chunks = [rows for rows in order.chunk(self._algorithm.num_minibatches) if len(rows)]
        parts = [batch.select(rows) for rows in chunks]
        # All before the first of them changes the policy.
        fixed = [
            fixed_logprobs(self.policy, self.reference, part, self._algorithm) for part in parts
        ]
        reports = [
            self._minibatch_step(part, advantages_B[rows], logprobs)
            for part, rows, logprobs in zip(parts, chunks, fixed, strict=True)
        ]
        trained_BT = batch.mask_BT & kept_B[:, None]
        return {
            **mean_reports(reports),
            "train/learning_rate": learning_rate,
            "train/num_tokens": int(trained_BT.sum()),
            "train/num_stale_tokens": int((batch.policy_lag_BT[trained_BT] >= 1).sum()),
            "train/zero_variance_fraction": 1.0 - float(kept_B.float().mean()),
        }

    def _training_rewards(self, batch: RolloutBatch) -> torch.Tensor:
        """The batch's rewards [B]; if shuffled, dealt out anew among those that did not fail."""
        if not self._algorithm.shuffle_rewards:
            return batch.rewards_B
        valid = (~batch.rewards_B.isnan()).nonzero().flatten()
        rewards_B = batch.rewards_B.clone()
        rewards_B[valid] = rewards_B[valid[torch.randperm(len(valid))]]
        return rewards_B

    def _minibatch_step(
        self, batch: RolloutBatch, advantages_B: torch.Tensor, fixed: Mapping[str, torch.Tensor]
    ) -> dict[str, float]:
        loss, metrics = batch_loss(
            self.policy, batch, advantages_B[:, None], self._algorithm, fixed
        )
        self.optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.policy.parameters(), self._trainer.max_grad_norm)
        self.optimizer.step()
        return {**metrics, "grad_norm": float(norm)}


def make_grpo_learner(
    policy: PreTrainedModel, settings: JobSettings, checkpoint: Path
) -> GrpoLearner:
    """With the reference policy of the checkpoint's run; the rest is in policy and optimizer."""
    reference = load_reference(checkpoint.parents[1], settings.algorithm.loss)
    return GrpoLearner(policy, settings.algorithm, settings.trainer, reference)


def batch_loss(
    policy: PreTrainedModel,
    batch: RolloutBatch,
    advantages_BT: torch.Tensor,
    algorithm: AlgorithmSettings,
    fixed: Mapping[str, torch.Tensor],
) -> tuple[torch.Tensor, dict[str, float]]:
    """The policy loss of `batch`, and its metrics; `fixed` is what `fixed_logprobs` gave for it."""
    # Padding is on the right, where no token of a causal model attends to it.
    logits_BTV = policy(input_ids=batch.tokens_BT).logits
    return policy_loss(
        token_logprobs(logits_BTV, batch.tokens_BT, algorithm.temperature),
        batch.behaviour_logprobs_BT,
        advantages_BT,
        batch.mask_BT,
        algorithm.loss,
        policy_lag_BT=batch.policy_lag_BT,
        kv_lag_BT=batch.kv_lag_BT,
        entropies_BT=token_entropies(logits_BTV, algorithm.temperature),
        **fixed,
    )


@torch.no_grad()
def fixed_logprobs(
    policy: PreTrainedModel,
    reference: PreTrainedModel | None,
    batch: RolloutBatch,
    algorithm: AlgorithmSettings,
) -> dict[str, torch.Tensor]:
    """Log-probs [B, T] that the steps of an update share, by their names in `policy_loss`.

    The policy's own, before the first step, are left out where they equal those of the engine.
    """
    models = {}
    is_stale_BT = (batch.policy_lag_BT > 0) | (batch.kv_lag_BT > 0)
    is_stale = bool(is_stale_BT[batch.mask_BT].any())
    if algorithm.decoupled and (is_stale or algorithm.loss.correction.needs_proximal):
        models["proximal_logprobs_BT"] = policy
    if reference is not None:
        models["reference_logprobs_BT"] = reference
    return {
        name: token_logprobs(
            model(input_ids=batch.tokens_BT).logits, batch.tokens_BT, algorithm.temperature
        )
        for name, model in models.items()
    }


def mean_reports(reports: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The mean of each metric over the minibatches that report it, as `train/<name>`."""
    names = dict.fromkeys(name for report in reports for name in report)
    return {
        f"train/{name}": fmean(report[name] for report in reports if name in report)
        for name in names
    }


def learning_rate_at(step: int, settings: TrainerSettings) -> float:
    """Linear rise over `warmup_steps`, then linear decay to the final fraction; steps from 1."""
    if step <= settings.warmup_steps:
        return settings.learning_rate * step / settings.warmup_steps
    done = (step - settings.warmup_steps) / max(settings.num_steps - settings.warmup_steps, 1)
    return settings.learning_rate * (
        1.0 - (1.0 - settings.final_learning_rate_fraction) * min(done, 1.0)
    )
