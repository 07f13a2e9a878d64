"""One GRPO training step on a batch of rollouts.

Shape letters: B rollouts, T positions, P prompts, G rollouts per prompt.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean

import torch
from transformers import PreTrainedModel

from examples.grpo.settings import AlgorithmSettings, JobSettings, TrainerSettings
from trainer_hooks import (
    RolloutBatch,
    group_advantages,
    has_reward_spread,
    policy_loss,
    token_logprobs,
)


class GrpoLearner:
    """Owns the optimizer of `policy` and changes its weights, in place."""

    def __init__(
        self, policy: PreTrainedModel, algorithm: AlgorithmSettings, trainer: TrainerSettings
    ) -> None:
        self.policy = self.saved = policy
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
        proximal = [proximal_logprobs(self.policy, part, self._algorithm) for part in parts]
        reports = [
            self._minibatch_step(part, advantages_B[rows], proximal_BT)
            for part, rows, proximal_BT in zip(parts, chunks, proximal, strict=True)
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
        self, batch: RolloutBatch, advantages_B: torch.Tensor, proximal_BT: torch.Tensor | None
    ) -> dict[str, float]:
        loss, metrics = policy_loss(
            completion_logprobs(self.policy, batch, self._algorithm),
            batch.behaviour_logprobs_BT,
            advantages_B[:, None],
            batch.mask_BT,
            self._algorithm.loss,
            proximal_logprobs_BT=proximal_BT,
            policy_lag_BT=batch.policy_lag_BT,
            kv_lag_BT=batch.kv_lag_BT,
        )
        self.optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.policy.parameters(), self._trainer.max_grad_norm)
        self.optimizer.step()
        return {**metrics, "grad_norm": float(norm)}


def make_grpo_learner(policy: PreTrainedModel, settings: JobSettings, _: Path) -> GrpoLearner:
    """All of it is in the policy and the optimizer; a checkpoint has nothing else."""
    return GrpoLearner(policy, settings.algorithm, settings.trainer)


def completion_logprobs(
    policy: PreTrainedModel, batch: RolloutBatch, algorithm: AlgorithmSettings
) -> torch.Tensor:
    """The policy's log-probs of the batch's tokens [B, T], at the temperature they were drawn."""
    # Padding is on the right, where no token of a causal model attends to it.
    logits_BTV = policy(input_ids=batch.tokens_BT).logits
    return token_logprobs(logits_BTV, batch.tokens_BT, algorithm.temperature)


@torch.no_grad()
def proximal_logprobs(
    policy: PreTrainedModel, batch: RolloutBatch, algorithm: AlgorithmSettings
) -> torch.Tensor | None:
    """What to clip around, before the first step of an update: None for the behaviour policy."""
    is_stale = bool((batch.policy_lag_BT[batch.mask_BT] >= 1).any())
    return (
        completion_logprobs(policy, batch, algorithm) if algorithm.decoupled and is_stale else None
    )


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
