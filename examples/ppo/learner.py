"""One PPO training step on a batch of rollouts: a policy, a critic, GAE.

Shape letters: B rollouts, T positions, E hidden size.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from examples.grpo.learner import (
    batch_loss,
    fixed_logprobs,
    learning_rate_at,
    mean_reports,
)
from examples.grpo.reference import load_reference
from examples.ppo.settings import PpoJobSettings
from trainer_hooks import RolloutBatch, gae_advantages, value_loss

_CRITIC_FILE = "critic.pt"


class Critic(nn.Module):
    """A trunk as the policy's, and a head that says what a prefix is worth."""

    def __init__(self, trunk: nn.Module, hidden_size: int) -> None:
        super().__init__()
        self.trunk = trunk
        self.head = nn.Linear(hidden_size, 1)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, tokens_BT: torch.Tensor) -> torch.Tensor:
        """Values [B, T]: column t is that of the prefix before token t, from which it is drawn."""
        hidden_BTE = self.trunk(input_ids=tokens_BT).last_hidden_state
        values_BT = self.head(hidden_BTE).squeeze(-1)
        return torch.cat([values_BT[:, :1], values_BT[:, :-1]], dim=1)


class PolicyAndCritic:
    """What a checkpoint of the job holds: a transformers directory, with the critic beside it."""

    def __init__(self, policy: PreTrainedModel, critic: Critic) -> None:
        self.policy, self.critic = policy, critic

    def save_pretrained(self, save_directory: str) -> None:
        """As of the policy, with the critic in a file of its own."""
        self.policy.save_pretrained(save_directory)
        torch.save(self.critic.state_dict(), Path(save_directory) / _CRITIC_FILE)


class PpoLearner:
    """Owns policy, critic and their optimizer; `reference` is the KL term's, None without one."""

    def __init__(
        self,
        policy: PreTrainedModel,
        critic: Critic,
        settings: PpoJobSettings,
        reference: PreTrainedModel | None = None,
    ) -> None:
        self.policy, self.critic, self.reference = policy, critic, reference
        self.saved = PolicyAndCritic(policy, critic)
        self._settings = settings
        trainer = settings.trainer
        self.optimizer = torch.optim.AdamW(
            [
                {"params": list(policy.parameters()), "lr": trainer.learning_rate},
                {"params": list(critic.parameters()), "lr": settings.critic.learning_rate},
            ],
            betas=trainer.betas,
            weight_decay=0.0,
        )

    def update(self, batch: RolloutBatch, step: int) -> dict[str, float]:
        """Train on all rollouts that did not fail, in minibatches; returns `train/*` metrics."""
        settings, own = self._settings, self._settings.critic
        with torch.no_grad():
            old_values_BT = self.critic(batch.tokens_BT)
        advantages_BT, returns_BT = gae_advantages(
            final_rewards(batch), old_values_BT, batch.mask_BT, gamma=own.gamma, lam=own.lam
        )
        advantages_BT = whitened(advantages_BT, batch.mask_BT)
        learning_rate = learning_rate_at(step, settings.trainer)
        is_warming_up = step <= own.warmup_steps
        self.optimizer.param_groups[0]["lr"] = 0.0 if is_warming_up else learning_rate
        order = (~batch.rewards_B.isnan()).nonzero().flatten()
        order = order[torch.randperm(len(order))]
        chunks = order.chunk(settings.algorithm.num_minibatches)
        parts = [batch.select(rows) for rows in chunks]
        # All before the first of them changes the policy.
        fixed = [
            fixed_logprobs(self.policy, self.reference, part, settings.algorithm) for part in parts
        ]
        reports = []
        for part, rows, logprobs in zip(parts, chunks, fixed, strict=True):
            width = part.tokens_BT.shape[1]
            wanted = (advantages_BT, old_values_BT, returns_BT)
            values = (x[rows, :width] for x in wanted)
            reports.append(self._minibatch_step(part, logprobs, *values))
        return {
            **mean_reports(reports),
            "train/learning_rate": learning_rate,
            "train/num_tokens": int(batch.mask_BT.sum()),
            "train/num_stale_tokens": int((batch.policy_lag_BT[batch.mask_BT] >= 1).sum()),
        }

    def _minibatch_step(
        self,
        batch: RolloutBatch,
        fixed: Mapping[str, torch.Tensor],
        advantages_BT: torch.Tensor,
        old_values_BT: torch.Tensor,
        returns_BT: torch.Tensor,
    ) -> dict[str, float]:
        loss, metrics = batch_loss(
            self.policy, batch, advantages_BT, self._settings.algorithm, fixed
        )
        critic_loss, critic_metrics = value_loss(
            self.critic(batch.tokens_BT),
            old_values_BT,
            returns_BT,
            batch.mask_BT,
            clip_range=self._settings.critic.clip_range,
        )
        self.optimizer.zero_grad()
        (loss + critic_loss).backward()  # they share no parameter
        max_norm = self._settings.trainer.max_grad_norm
        norm = nn.utils.clip_grad_norm_(self.policy.parameters(), max_norm)
        nn.utils.clip_grad_norm_(self.critic.parameters(), max_norm)
        self.optimizer.step()
        return {**metrics, **critic_metrics, "grad_norm": float(norm)}


def final_rewards(batch: RolloutBatch) -> torch.Tensor:
    """Rewards [B, T]: a rollout's own on its last generated token, 0 elsewhere."""
    rewards_BT = torch.zeros_like(batch.behaviour_logprobs_BT)
    num_positions = batch.mask_BT.shape[1]
    last_B = num_positions - 1 - batch.mask_BT.flip(1).int().argmax(dim=1)
    rewards_BT[torch.arange(len(batch)), last_B] = batch.rewards_B
    return rewards_BT


def whitened(values_BT: torch.Tensor, mask_BT: torch.Tensor) -> torch.Tensor:
    """Mean 0 and deviation 1 over the mask; 0 outside."""
    chosen = values_BT[mask_BT]
    scaled_BT = (values_BT - chosen.mean()) / chosen.std().clamp(min=1e-6)
    return scaled_BT.masked_fill(~mask_BT, 0.0)


def make_ppo_learner(policy: PreTrainedModel, settings: Any, checkpoint: Path) -> PpoLearner:
    """The critic is the checkpoint's; at first, a copy of the policy with a head of zeros."""
    critic = Critic(copy.deepcopy(policy.base_model), policy.config.hidden_size)
    saved = checkpoint / _CRITIC_FILE
    if saved.exists():
        critic.load_state_dict(torch.load(saved, weights_only=True))
    reference = load_reference(checkpoint.parents[1], settings.algorithm.loss)
    return PpoLearner(policy, critic, settings, reference)
