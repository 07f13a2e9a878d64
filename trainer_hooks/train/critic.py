"""Critic: PPO's value model, which estimates the value of each prefix of a rollout.

Used by `trainer_hooks.train.learner`. Shape letters: B rows, T positions, E hidden size.
"""

from __future__ import annotations

import copy

import torch
from torch import nn
from transformers import PreTrainedModel

from trainer_hooks import (
    RolloutBatch,
    UpdateSettings,
    gae_advantages,
    split_micro_batches,
    value_loss,
)
from trainer_hooks.losses.advantages import whitened
from trainer_hooks.train.job import CriticSettings

Columns = dict[str, torch.Tensor]  # [B, T] tensors beside those of a batch, by name


class Critic(nn.Module):
    """A copy of the policy's base model with a linear head that outputs the value of each
    prefix."""

    def __init__(self, policy: PreTrainedModel, settings: CriticSettings) -> None:
        super().__init__()
        self.settings = settings
        self.trunk = copy.deepcopy(policy.base_model)
        self.head = nn.Linear(policy.config.hidden_size, 1)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, tokens_BT: torch.Tensor) -> torch.Tensor:
        """Return values [B, T]. Column t is the value of the prefix before token t. Token 0 has no
        prefix, so column 0 repeats column 1."""
        hidden_BTE = self.trunk(input_ids=tokens_BT).last_hidden_state
        values_BT = self.head(hidden_BTE).squeeze(-1)
        return torch.cat([values_BT[:, :1], values_BT[:, :-1]], dim=1)

    @torch.no_grad()
    def columns(
        self, batch: RolloutBatch, rewards_BT: torch.Tensor, update: UpdateSettings
    ) -> Columns:
        """Return `advantages_BT` (whitened), `old_values_BT` and `returns_BT`. `rewards_BT` has the
        reward of each token. `update` has the size of micro-batches."""
        old_values_BT = torch.zeros(batch.tokens_BT.shape)
        for rows in split_micro_batches(batch.lengths_B, update.max_tokens):
            part = batch.select(rows)
            old_values_BT[rows, : part.tokens_BT.shape[1]] = self(part.tokens_BT)
        advantages_BT, returns_BT = gae_advantages(
            rewards_BT,
            old_values_BT,
            batch.mask_BT,
            gamma=self.settings.gamma,
            lam=self.settings.lam,
        )
        return {
            "advantages_BT": whitened(advantages_BT, batch.mask_BT),
            "old_values_BT": old_values_BT,
            "returns_BT": returns_BT,
        }

    def accumulate_gradients(
        self, batch: RolloutBatch, columns: Columns, update: UpdateSettings
    ) -> dict[str, float]:
        """Add the gradient of the value loss to the critic's parameters. Return the loss's
        metrics."""
        num_tokens = int(batch.mask_BT.sum())
        totals = dict.fromkeys(("vf_loss", "vf_clipfrac", "vpred_mean"), 0.0)
        for rows in split_micro_batches(batch.lengths_B, update.max_tokens):
            part = batch.select(rows)
            width = part.tokens_BT.shape[1]
            loss, metrics = value_loss(
                self(part.tokens_BT),
                columns["old_values_BT"][rows, :width],
                columns["returns_BT"][rows, :width],
                part.mask_BT,
                clip_range=self.settings.clip_range,
                aggregation_denominator=max(num_tokens, 1),
            )
            loss.backward()
            share = int(part.mask_BT.sum()) / max(num_tokens, 1)
            for name, value in metrics.items():
                totals[name] += value if name == "vf_loss" else value * share
        return totals
