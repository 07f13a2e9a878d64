"""Learner: one training step on a batch of rollouts, by GRPO and its variants, REINFORCE++ or PPO.

Used by `trainer_hooks.train.main`, which calls a Learner on rank 0 and `follow` on the trainer's
other ranks. `benchmarks.trl_step` and `benchmarks.kv_age` use `optimizer_of`. A step changes the
policy, optimizer, scheduler, critic and reference. `save` writes checkpoints.

Shape letters: R rollouts, B rows (token sequences of rollouts), T positions, P prompts, G rollouts
per prompt.
"""

from __future__ import annotations

import asyncio
import signal
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from transformers import AutoModelForCausalLM

from rollout.backends.cpu.mapping import trim_heap
from rollout.errors import ConfigError, WeightUpdateError
from trainer_hooks import (
    ReferencePolicy,
    RolloutBatch,
    TrainerState,
    WeightSync,
    accumulate_gradients,
    compute_logprobs,
    group_advantages,
    has_reward_spread,
    join_push,
    load_checkpoint,
    merged_tensors,
    reinforce_plus_plus_advantages,
    save_checkpoint,
    token_rewards,
)
from trainer_hooks.checkpoint import read_own_state
from trainer_hooks.train.adapter import load_adapter
from trainer_hooks.train.config_loading import make_object
from trainer_hooks.train.critic import Columns, Critic
from trainer_hooks.train.job import AlgorithmSettings, JobSettings, TrainerSettings
from trainer_hooks.train.settings import ModelSettings
from trainer_hooks.update.bfloat16_adamw import BFloat16AdamW
from trainer_hooks.update.guarded_step import GuardedStep
from trainer_hooks.weight_sync.fsdp2 import WholeOptimizer, savable, shard
from trainer_hooks.weight_sync.trainer_ranks import ALONE, TrainerRanks


class Learner:
    """Owns the policy, its optimizer and scheduler, and PPO's critic.

    If `ranks` share the policy, each rank has a Learner with its part. Methods called on rank 0
    first send their command to the other ranks, which execute it in `follow`.

    `policy`: a model of transformers, or a PEFT model whose adapter is trained.
    `reference`: the reference policy of the KL term, or None if there is no KL term.
    `advantages_B`: mean advantage over the trained tokens of each row of the last update.
    `skipped_directory`: where `GuardedStep` saves the batches of skipped steps, or None.
    """

    def __init__(
        self,
        policy: Any,
        algorithm: AlgorithmSettings,
        trainer: TrainerSettings,
        reference: ReferencePolicy | None = None,
        ranks: TrainerRanks = ALONE,
        skipped_directory: Path | None = None,
    ) -> None:
        self.policy, self.reference, self._ranks = policy, reference, ranks
        self._algorithm, self._trainer = algorithm, trainer
        self.advantages_B = torch.zeros(0)
        self._loss = algorithm.loss.with_limit(algorithm.max_new_tokens)
        self._settings = replace(
            algorithm.update_settings,
            gradient_checkpointing=trainer.gradient_checkpointing,
            autocast=trainer.autocast,
        )
        trained = [parameter for parameter in policy.parameters() if parameter.requires_grad]
        groups = [{"params": trained, "lr": trainer.learning_rate}]
        self.critic = None
        if algorithm.critic is not None:
            self.critic = Critic(policy, algorithm.critic)
            rate = algorithm.critic.learning_rate
            groups.append({"params": list(self.critic.parameters()), "lr": rate})
        self.optimizer = optimizer_of(groups, trainer)
        self.scheduler = scheduler_of(self.optimizer, trainer)
        self._guard = GuardedStep(
            self.optimizer, trainer.max_grad_norm, trainer.max_skipped_steps, ranks,
            skipped_directory,
        )  # fmt: skip

    @classmethod
    def load(
        cls, checkpoint: Path, settings: JobSettings, ranks: TrainerRanks = ALONE
    ) -> tuple[Learner, TrainerState]:
        """Return a Learner with the states in `checkpoint`, and its TrainerState.

        Restores random states, too. Raises ConfigError if the checkpoint's run had another model
        shape, no reference policy or another optimizer.
        """
        ranks.broadcast(("load", str(checkpoint)))
        lora = settings.model.lora
        if lora is not None:
            base = base_weights(checkpoint.parents[1], settings.model)
            policy: Any = load_adapter(base, checkpoint, lora)
        else:
            policy = AutoModelForCausalLM.from_pretrained(checkpoint)
        for name, wanted in settings.model.shape.items():
            if wanted is not None and (saved := getattr(policy.config, name)) != wanted:
                raise ConfigError(
                    f"model.{name}={wanted}, but the policy in {checkpoint} has {saved}; resume "
                    "with the settings that the run began with, or start one with another run_name"
                )
        # A reference that follows the policy has its weights in the checkpoint.
        reference, own = None, read_own_state(checkpoint) or {}
        if settings.algorithm.needs_reference and lora is not None:
            reference = ReferencePolicy.without_adapter(policy)
        elif settings.algorithm.needs_reference:
            reference = _reference(checkpoint.parents[1] / "reference", settings)
            reference.load_state_dict(own.get("reference", {}))
        if settings.trainer.strategy == "fsdp2":
            shard(policy)
        learner = cls(
            policy, settings.algorithm, settings.trainer, reference, ranks,
            skipped_directory=checkpoint.parents[1] / "skipped",
        )  # fmt: skip
        if learner.critic is not None and "critic" in own:
            learner.critic.load_state_dict(own["critic"])
        optimizer = WholeOptimizer(learner.optimizer)
        return learner, load_checkpoint(checkpoint, optimizer, learner.scheduler)

    def save(self, root: Path, state: TrainerState, tokenizer: Any) -> Path:
        """Write a checkpoint of the whole policy under `root`. Return its directory."""
        self._ranks.broadcast(("save",))
        return save_checkpoint(
            root, state, savable(self.policy, is_kept=True), WholeOptimizer(self.optimizer),
            tokenizer, scheduler=self.scheduler, own_state=self.own_state(),
        )  # fmt: skip

    def join_save(self) -> None:
        """Send this rank's part of a checkpoint to rank 0, which saves it."""
        savable(self.policy, is_kept=False)
        WholeOptimizer(self.optimizer).state_dict()

    async def push(
        self, weight_sync: WeightSync, version: int, merges_adapter: bool = False
    ) -> None:
        """Push the policy to the engines as `version`. Raises WeightUpdateError.

        `merges_adapter` pushes all weights of a PEFT model with its adapter merged. Transient
        errors are retried after the pauses of `weight_sync`.
        """
        for pause_s in (*weight_sync.retry_pauses_s, None):
            self._ranks.broadcast(("push",))
            try:
                source = merged_tensors(self.policy) if merges_adapter else self.policy
                await weight_sync.apush(source, version)
                return
            except WeightUpdateError as error:
                # All ranks must gather their weights again. A single rank was retried by `apush`.
                is_repeated = self._ranks.size > 1 and error.is_transient
                if not is_repeated or pause_s is None:
                    raise
            await asyncio.sleep(pause_s)

    def own_state(self) -> dict[str, Any]:
        """Return the states of critic and reference, which a checkpoint keeps beside the policy."""
        parts = {"critic": self.critic, "reference": self.reference}
        return {name: part.state_dict() for name, part in parts.items() if part is not None}

    def update(self, batch: RolloutBatch, step: int) -> dict[str, float]:
        """Train in minibatches on the rollouts that have a gradient. Return `train/*` metrics.

        The rollouts of `batch` are ordered by group. `step` counts from 1. Also sets `advantages_B`
        and updates a reference that follows the policy.
        """
        self._ranks.broadcast(("update", batch.as_dict(), step))
        if self._algorithm.mask_truncated_completions:
            batch = batch.without_truncated()
        columns, kept_R = self._columns(batch)
        num_trained_B = batch.mask_BT.sum(dim=1).clamp(min=1)
        sums_B = columns["advantages_BT"].masked_fill(~batch.mask_BT, 0.0).sum(dim=1)
        self.advantages_B = sums_B / num_trained_B
        parts = []
        for rows in batch.split_rollouts(self._algorithm.num_minibatches, kept_R):
            part = batch.select(rows)
            own = {k: v[rows, : part.tokens_BT.shape[1]] for k, v in columns.items()}
            # Computed for all minibatches before the first one changes the policy.
            parts.append((part, {**self._fixed_logprobs(part), **own}))
        rates = self.scheduler.get_last_lr()
        is_critics_alone = self.critic is not None and step <= self.critic.settings.warmup_steps
        policy_group = self.optimizer.param_groups[0]
        policy_group["lr"] = 0.0 if is_critics_alone else rates[0]
        reports = [
            self._minibatch_step(*part)
            for _ in range(self._algorithm.num_iterations)
            for part in parts
        ]
        policy_group["lr"] = rates[0]
        self.optimizer.zero_grad()
        trim_heap()  # the gradients' memory is free while engines generate
        if not any(reports):  # the scheduler expects an optimizer step even without a gradient
            self.optimizer.step()
        self.scheduler.step()
        if self.reference is not None:
            self.reference.follow(self.policy, step)
        return self._metrics(batch, reports, kept_R, rates[0])

    def _metrics(
        self,
        batch: RolloutBatch,
        reports: list[dict[str, float]],
        kept_R: torch.Tensor,
        rate: float,
    ) -> dict[str, float]:
        trained_BT = batch.mask_BT & batch.per_row(kept_R)[:, None]
        names = dict.fromkeys(name for report in reports for name in report)  # {} where skipped
        metrics = {
            **{f"train/{name}": fmean(r[name] for r in reports if name in r) for name in names},
            "train/learning_rate": rate,
            "train/skipped_steps": sum(not report for report in reports),
            "train/num_tokens": int(trained_BT.sum()),
            "train/num_stale_tokens": int((batch.policy_lag_BT[trained_BT] >= 1).sum()),
        }
        if self.critic is None and self._algorithm.advantage_estimator == "group":
            metrics["train/zero_variance_fraction"] = 1.0 - float(kept_R.float().mean())
        return metrics

    # ---- advantages

    def _columns(self, batch: RolloutBatch) -> tuple[Columns, torch.Tensor]:
        """Return `advantages_BT` and other columns, and a bool mask [R] of the rollouts to train
        on."""
        algorithm, columns, rewards_R = self._algorithm, Columns(), self._rewards(batch)
        if algorithm.reward_kl_coefficient > 0.0:
            columns["reference_logprobs_BT"] = self._reference_logprobs(batch)
        if self.critic is None and algorithm.advantage_estimator == "group":
            return self._group_columns(batch, rewards_R, columns)
        if algorithm.advantage_estimator == "reinforce_plus_plus_baseline":
            is_failed_R = rewards_R.isnan()
            centred_PG = group_advantages(rewards_R.view(-1, algorithm.group_size), "none")
            rewards_R = centred_PG.flatten().masked_fill(is_failed_R, torch.nan)
        rewards_BT = self._token_rewards(batch, rewards_R, columns)
        if self.critic is not None:
            columns |= self.critic.columns(batch, rewards_BT, self._settings)
        else:
            advantages_BT = reinforce_plus_plus_advantages(rewards_BT, batch.mask_BT)
            columns["advantages_BT"] = advantages_BT
        return columns, ~rewards_R.isnan()

    def _rewards(self, batch: RolloutBatch) -> torch.Tensor:
        """Return the rewards [R]. With `shuffle_rewards`, all rewards that are not NaN are
        permuted."""
        rewards_R = batch.rewards_R
        if self._algorithm.shuffle_rewards:
            valid = (~rewards_R.isnan()).nonzero().flatten()
            rewards_R = rewards_R.clone()
            rewards_R[valid] = rewards_R[valid[torch.randperm(len(valid))]]
        return rewards_R

    def _token_rewards(
        self, batch: RolloutBatch, rewards_R: torch.Tensor, columns: Columns
    ) -> torch.Tensor:
        """Return rewards [B, T]. A rollout's reward is on its last token, and each token's KL
        penalty is subtracted."""
        logprobs_BT = batch.behaviour_logprobs_BT
        # Without a reference the coefficient is 0, and the reference's log-probs have no effect.
        reference_BT = columns.get("reference_logprobs_BT", logprobs_BT)
        rewards_B = replace(batch, rewards_R=rewards_R).rewards_B
        return token_rewards(
            rewards_B, logprobs_BT, reference_BT, batch.mask_BT,
            self._algorithm.reward_kl_coefficient,
        )  # fmt: skip

    def _group_columns(
        self, batch: RolloutBatch, rewards_R: torch.Tensor, columns: Columns
    ) -> tuple[Columns, torch.Tensor]:
        """Return `columns` with advantages within each group, and a bool mask [R] of the rollouts
        in groups whose rewards differ."""
        algorithm = self._algorithm
        if algorithm.reward_kl_coefficient > 0.0:
            penalties_BT = token_rewards(
                torch.zeros(len(batch)), batch.behaviour_logprobs_BT,
                columns["reference_logprobs_BT"], batch.mask_BT, algorithm.reward_kl_coefficient,
            )  # fmt: skip
            rewards_R = rewards_R + batch.per_rollout(penalties_BT.sum(dim=1))
        rewards_PG = rewards_R.view(-1, algorithm.group_size)
        how = algorithm.loss.advantages(
            algorithm.advantage_normalization, algorithm.advantage_baseline
        )
        advantages_B1 = batch.per_row(group_advantages(rewards_PG, *how))[:, None]
        kept_R = has_reward_spread(rewards_PG).repeat_interleave(algorithm.group_size)
        return {**columns, "advantages_BT": advantages_B1.expand(batch.tokens_BT.shape)}, kept_R

    # ---- steps

    def _fixed_logprobs(self, batch: RolloutBatch) -> Columns:
        """Return the log-probs that all steps of an update share, by their names in
        `policy_loss`."""
        algorithm, columns = self._algorithm, Columns()
        is_stale_BT = (batch.policy_lag_BT > 0) | (batch.kv_lag_BT > 0)
        is_stale = bool(is_stale_BT[batch.mask_BT].any())
        # Without stale tokens the proximal log-probs equal the engine's.
        if algorithm.decoupled and (is_stale or algorithm.loss.correction.needs_proximal):
            columns["proximal_logprobs_BT"] = compute_logprobs(
                self.policy, batch, self._settings, self._ranks
            )
        if algorithm.loss.kl_coefficient > 0.0 and not algorithm.reward_kl_coefficient > 0.0:
            columns["reference_logprobs_BT"] = self._reference_logprobs(batch)
        return columns

    def _reference_logprobs(self, batch: RolloutBatch) -> torch.Tensor:
        assert self.reference is not None, "the settings need it"
        return self.reference.logprobs(batch, self._settings, self._ranks)

    def _minibatch_step(self, batch: RolloutBatch, columns: Columns) -> dict[str, float]:
        """Take one optimizer step. Return its metrics, or {} if non-finite gradients skipped it."""
        self.optimizer.zero_grad()
        own = {k: v for k, v in columns.items() if k not in ("old_values_BT", "returns_BT")}
        metrics = accumulate_gradients(
            self.policy, batch, own, self._loss, self._settings, self._ranks
        )
        trained: list[nn.Module] = [self.policy]
        if self.critic is not None:  # the critic shares no parameter with the policy
            metrics |= self.critic.accumulate_gradients(batch, columns, self._settings)
            trained.append(self.critic)
        norm, is_done = self._guard.step(trained, batch)
        return {**metrics, "grad_norm": norm} if is_done else {}


def follow(ranks: TrainerRanks, settings: JobSettings) -> None:
    """Execute rank 0's commands on this rank's part of the policy, until rank 0 sends None. Ignores
    SIGINT and SIGTERM from then on."""
    for number in (signal.SIGINT, signal.SIGTERM):  # rank 0 handles them, between two steps
        signal.signal(number, signal.SIG_IGN)
    torch.set_num_threads(settings.trainer.num_threads or torch.get_num_threads())
    learner: Any = None
    while (command := ranks.receive()) is not None:
        match command:
            case ("load", checkpoint):
                learner, _ = Learner.load(Path(checkpoint), settings, ranks)
            case ("update", columns, step):
                learner.update(RolloutBatch(**columns), step)
            case ("push",):
                join_push(learner.policy)
            case ("save",):
                learner.join_save()


def base_weights(directory: Path, model: ModelSettings) -> Path | str:
    """Return the path of the weights from which a run's engines and adapter start. It is base/ in
    the run's `directory` if base/ exists or the model has no path, else model.path."""
    own = directory / "base"
    return own if own.exists() or model.path is None else model.path


def _reference(path: Path, settings: JobSettings) -> ReferencePolicy:
    """Load the reference policy from `path`. Raises ConfigError if there is none."""
    algorithm = settings.algorithm
    if not path.exists():
        coefficients = algorithm.loss.kl_coefficient, algorithm.reward_kl_coefficient
        raise ConfigError(
            f"algorithm.loss.kl_coefficient={coefficients[0]} and "
            f"algorithm.reward_kl_coefficient={coefficients[1]} need the reference policy {path}, "
            "which a run that began without a KL term does not have; set both to 0, or start over "
            "with resume=never"
        )
    model = AutoModelForCausalLM.from_pretrained(path).requires_grad_(False)
    if settings.trainer.strategy == "fsdp2":
        shard(model)
    return ReferencePolicy(model, settings=algorithm.reference)


def optimizer_of(groups: list[dict[str, Any]], settings: TrainerSettings) -> torch.optim.Optimizer:
    """Return AdamW without weight decay for parameter groups, with states in the settings' dtype.
    Raises ConfigError for parameters that bfloat16 states do not support."""
    if settings.optimizer_state_dtype == "bfloat16":
        return BFloat16AdamW(groups, betas=settings.betas)
    return torch.optim.AdamW(groups, betas=settings.betas, weight_decay=0.0, fused=True)


def scheduler_of(optimizer: torch.optim.Optimizer, settings: TrainerSettings) -> Any:
    """Return the scheduler that the settings name, or linear warm-up and decay.

    Warm-up and decay change only the policy's rate. Raises ConfigError for a path that names
    nothing, and for options that it does not accept.
    """
    if (own := settings.scheduler) is not None:
        return make_object(own.path, own.options, "trainer.scheduler", optimizer)
    # The critic's rate stays constant.
    factors = [lambda done: learning_rate_at(done + 1, settings) / settings.learning_rate]
    return LambdaLR(optimizer, factors + [lambda done: 1.0] * (len(optimizer.param_groups) - 1))


def learning_rate_at(step: int, settings: TrainerSettings) -> float:
    """Return the learning rate of `step`, counted from 1, by linear warm-up and then linear
    decay."""
    if step <= settings.warmup_steps:
        return settings.learning_rate * step / settings.warmup_steps
    done = (step - settings.warmup_steps) / max(settings.num_steps - settings.warmup_steps, 1)
    decay = (1.0 - settings.final_learning_rate_fraction) * min(done, 1.0)
    return settings.learning_rate * (1.0 - decay)
