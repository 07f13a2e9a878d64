"""One training step on a batch of rollouts: GRPO and its kin, or PPO where there is a critic.

Shape letters: B rollouts, T positions, P prompts, G rollouts per prompt, E hidden size.
"""

from __future__ import annotations

import copy
from pathlib import Path
from statistics import fmean

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from examples.settings import AlgorithmSettings, CriticSettings, JobSettings, TrainerSettings
from rollout.errors import ConfigError
from trainer_hooks import (
    RolloutBatch,
    TrainerState,
    UpdateSettings,
    accumulate_gradients,
    fixed_logprobs,
    gae_advantages,
    group_advantages,
    has_reward_spread,
    load_checkpoint,
    token_rewards,
    value_loss,
)

CRITIC_FILE = "critic.pt"
Columns = dict[str, torch.Tensor]  # [B, T] each, beside the columns of a batch


class Critic(nn.Module):
    """A trunk like the policy's, and a head that says what a prefix is worth."""

    def __init__(self, policy: PreTrainedModel, settings: CriticSettings) -> None:
        super().__init__()
        self.settings = settings
        self.trunk = copy.deepcopy(policy.base_model)
        self.head = nn.Linear(policy.config.hidden_size, 1)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, tokens_BT: torch.Tensor) -> torch.Tensor:
        """Values [B, T]: column t is that of the prefix before token t, from which it is drawn."""
        hidden_BTE = self.trunk(input_ids=tokens_BT).last_hidden_state
        values_BT = self.head(hidden_BTE).squeeze(-1)
        return torch.cat([values_BT[:, :1], values_BT[:, :-1]], dim=1)

    @torch.no_grad()
    def columns(self, batch: RolloutBatch) -> Columns:
        """Whitened advantages, and what the critic's own loss needs."""
        old_values_BT = self(batch.tokens_BT)
        logprobs_BT = batch.behaviour_logprobs_BT
        # With a coefficient of 0 this is the reward on the last generated token, and 0 elsewhere.
        rewards_BT = token_rewards(batch.rewards_B, logprobs_BT, logprobs_BT, batch.mask_BT, 0.0)
        advantages_BT, returns_BT = gae_advantages(
            rewards_BT,
            old_values_BT,
            batch.mask_BT,
            gamma=self.settings.gamma,
            lam=self.settings.lam,
        )
        trained = advantages_BT[batch.mask_BT]
        whitened_BT = (advantages_BT - trained.mean()) / trained.std().clamp(min=1e-6)
        return {
            "advantages_BT": whitened_BT,
            "old_values_BT": old_values_BT,
            "returns_BT": returns_BT,
        }


class Learner:
    """Owns the optimizer of `policy`, and of a critic if the algorithm has one.

    `reference`: the policy that the KL term of the loss, if it has one, holds `policy` near.
    `advantages_B`: of the rollouts of the last update, means over their tokens.
    """

    def __init__(
        self,
        policy: PreTrainedModel,
        algorithm: AlgorithmSettings,
        trainer: TrainerSettings,
        reference: PreTrainedModel | None = None,
    ) -> None:
        self.policy, self.reference = policy, reference
        self._algorithm, self._trainer = algorithm, trainer
        self.advantages_B = torch.zeros(0)
        self._loss = algorithm.loss.with_limit(algorithm.max_new_tokens)
        self._settings = UpdateSettings(temperature=algorithm.temperature)
        groups = [{"params": list(policy.parameters()), "lr": trainer.learning_rate}]
        self.critic = None
        if algorithm.critic is not None:
            self.critic = Critic(policy, algorithm.critic)
            rate = algorithm.critic.learning_rate
            groups.append({"params": list(self.critic.parameters()), "lr": rate})
        self.optimizer = torch.optim.AdamW(groups, betas=trainer.betas, weight_decay=0.0)

    @classmethod
    def load(cls, checkpoint: Path, settings: JobSettings) -> tuple[Learner, TrainerState]:
        """The learner and the state of a checkpoint. Restores the random states saved with it.

        The reference policy is read from beside the checkpoints.
        Raises ConfigError if the run of the checkpoint had another model, no reference policy or
        another optimizer.
        """
        policy = AutoModelForCausalLM.from_pretrained(checkpoint)
        for name, wanted in settings.model.shape.items():
            if wanted is not None and (saved := getattr(policy.config, name)) != wanted:
                raise ConfigError(
                    f"model.{name}={wanted}, but the policy in {checkpoint} has {saved}; resume "
                    "with the settings that the run began with, or start one with another run_name"
                )
        reference, coefficient = None, settings.algorithm.loss.kl_coefficient
        if coefficient > 0.0:
            path = checkpoint.parents[1] / "reference"
            if not path.exists():
                raise ConfigError(
                    f"algorithm.loss.kl_coefficient={coefficient} needs the reference policy "
                    f"{path}, which a run that began with 0 does not have; start over with "
                    "resume=never"
                )
            reference = AutoModelForCausalLM.from_pretrained(path).requires_grad_(False)
        learner = cls(policy, settings.algorithm, settings.trainer, reference)
        if learner.critic is not None and (checkpoint / CRITIC_FILE).exists():
            weights = torch.load(checkpoint / CRITIC_FILE, weights_only=True)
            learner.critic.load_state_dict(weights)
        return learner, load_checkpoint(checkpoint, learner.optimizer)

    def save_pretrained(self, save_directory: str) -> None:
        """A transformers directory of the policy, with the critic in a file of its own."""
        self.policy.save_pretrained(save_directory)
        if self.critic is not None:
            torch.save(self.critic.state_dict(), Path(save_directory) / CRITIC_FILE)

    def update(self, batch: RolloutBatch, step: int) -> dict[str, float]:
        """Train in minibatches on the rollouts that have a gradient; returns `train/*` metrics.

        The rows of `batch` are groups in turn; `step` counts from 1 and sets the learning rate.
        """
        rate, critic = learning_rate_at(step, self._trainer), self.critic
        if critic is None:
            columns, kept_B = self._groups(batch)
        else:
            columns, kept_B = critic.columns(batch), ~batch.rewards_B.isnan()
        num_trained_B = batch.mask_BT.sum(dim=1).clamp(min=1)
        sums_B = columns["advantages_BT"].masked_fill(~batch.mask_BT, 0.0).sum(dim=1)
        self.advantages_B = sums_B / num_trained_B
        trains_policy = critic is None or step > critic.settings.warmup_steps
        self.optimizer.param_groups[0]["lr"] = rate if trains_policy else 0.0
        order = kept_B.nonzero().flatten()
        order = order[torch.randperm(len(order))]
        parts = []
        for rows in order.chunk(self._algorithm.num_minibatches):
            if len(rows):
                part = batch.select(rows)
                own = {k: v[rows, : part.tokens_BT.shape[1]] for k, v in columns.items()}
                # All of them before the first minibatch changes the policy.
                parts.append((part, own, self._fixed_logprobs(part)))
        reports = [self._minibatch_step(*part) for part in parts]
        trained_BT = batch.mask_BT & kept_B[:, None]
        names = dict.fromkeys(name for report in reports for name in report)
        metrics = {
            **{f"train/{name}": fmean(r[name] for r in reports if name in r) for name in names},
            "train/learning_rate": rate,
            "train/num_tokens": int(trained_BT.sum()),
            "train/num_stale_tokens": int((batch.policy_lag_BT[trained_BT] >= 1).sum()),
        }
        if critic is None:
            metrics["train/zero_variance_fraction"] = 1.0 - float(kept_B.float().mean())
        return metrics

    def _groups(self, batch: RolloutBatch) -> tuple[Columns, torch.Tensor]:
        """Advantages of each rollout within its group; kept are the groups whose rewards differ."""
        algorithm, rewards_B = self._algorithm, batch.rewards_B
        if algorithm.shuffle_rewards:  # among the rollouts that did not fail
            valid = (~rewards_B.isnan()).nonzero().flatten()
            rewards_B = rewards_B.clone()
            rewards_B[valid] = rewards_B[valid[torch.randperm(len(valid))]]
        rewards_PG = rewards_B.view(-1, algorithm.group_size)
        how = algorithm.loss.advantages(
            algorithm.advantage_normalization, algorithm.advantage_baseline
        )
        advantages_B1 = group_advantages(rewards_PG, *how).view(-1, 1)
        kept_B = has_reward_spread(rewards_PG).repeat_interleave(algorithm.group_size)
        return {"advantages_BT": advantages_B1.expand(batch.tokens_BT.shape)}, kept_B

    def _fixed_logprobs(self, batch: RolloutBatch) -> Columns:
        """Log-probs that the steps of an update share, by their names in `policy_loss`.

        The policy's own are left out where they equal those of the engine.
        """
        algorithm, models = self._algorithm, {}
        is_stale_BT = (batch.policy_lag_BT > 0) | (batch.kv_lag_BT > 0)
        is_stale = bool(is_stale_BT[batch.mask_BT].any())
        if algorithm.decoupled and (is_stale or algorithm.loss.correction.needs_proximal):
            models["proximal_logprobs_BT"] = self.policy
        if self.reference is not None:
            models["reference_logprobs_BT"] = self.reference
        return {name: fixed_logprobs(m, batch, self._settings) for name, m in models.items()}

    def _minibatch_step(
        self, batch: RolloutBatch, columns: Columns, fixed: Columns
    ) -> dict[str, float]:
        self.optimizer.zero_grad()
        own = {"advantages_BT": columns["advantages_BT"], **fixed}
        metrics = accumulate_gradients(self.policy, batch, own, self._loss, self._settings)
        trained: list[nn.Module] = [self.policy]
        if self.critic is not None:
            critic_loss, critic_metrics = value_loss(
                self.critic(batch.tokens_BT),
                columns["old_values_BT"],
                columns["returns_BT"],
                batch.mask_BT,
                clip_range=self.critic.settings.clip_range,
            )
            critic_loss.backward()  # policy and critic share no parameter
            metrics |= critic_metrics
            trained.append(self.critic)
        norms = [
            nn.utils.clip_grad_norm_(model.parameters(), self._trainer.max_grad_norm)
            for model in trained
        ]
        self.optimizer.step()
        return {**metrics, "grad_norm": float(norms[0])}


def learning_rate_at(step: int, settings: TrainerSettings) -> float:
    """Linear rise over `warmup_steps`, then linear decay to the final fraction; steps from 1."""
    if step <= settings.warmup_steps:
        return settings.learning_rate * step / settings.warmup_steps
    done = (step - settings.warmup_steps) / max(settings.num_steps - settings.warmup_steps, 1)
    decay = (1.0 - settings.final_learning_rate_fraction) * min(done, 1.0)
    return settings.learning_rate * (1.0 - decay)
