"""Learner: one training step on batches made by hand."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")

from tests.trainer_hooks.fakes import finished_request
from tests.trainer_hooks.train.grpo_settings import tiny_settings
from trainer_hooks import (
    NonFiniteGradientError,
    ReferencePolicy,
    RolloutBatch,
    collate_rollouts,
)
from trainer_hooks.train.job import JobSettings
from trainer_hooks.train.learner import Learner, learning_rate_at


class Bigram(torch.nn.Module):
    """A model whose logits of the next token come from a table, with the interface of
    transformers.
    """

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(4, 4)
        torch.nn.init.zeros_(self.table.weight)
        self.num_rows_seen = 0

    def forward(self, input_ids: torch.Tensor) -> "Bigram":
        self.num_rows_seen += len(input_ids)
        self.logits = self.table(input_ids)
        return self


def two_groups(rewards: list[float | None], version: int = 0) -> RolloutBatch:
    """Return two groups of three rollouts that answer 1 with 2 or 3, with the table's log-probs."""
    requests = [
        finished_request([1], [token], versions=[version], logprobs=[-1.3862944])
        for token in (2, 3, 3, 2, 2, 3)
    ]
    return collate_rollouts(requests, rewards, train_version=1)


def learner(policy: Bigram, settings: JobSettings) -> Learner:
    return Learner(policy, settings.algorithm, settings.trainer)  # type: ignore[arg-type]


def test_learner_update_makes_the_rewarded_token_likelier() -> None:
    policy = Bigram()
    learner(policy, tiny_settings()).update(two_groups([1, 0, 0, 1, 1, 0]), step=1)
    weights = policy.table.weight[1]
    assert weights[2] > 0 > weights[3]


def test_learner_update_leaves_groups_of_equal_rewards_out() -> None:
    policy = Bigram()
    batch = two_groups([1, 0, 0, 1, 1, 1])
    metrics = learner(policy, tiny_settings()).update(batch, step=1)
    assert policy.num_rows_seen == 3
    assert metrics["train/zero_variance_fraction"] == 0.5
    assert metrics["train/num_tokens"] == metrics["train/num_stale_tokens"] == 3


def test_learner_update_without_reward_spread_changes_nothing() -> None:
    policy = Bigram()
    metrics = learner(policy, tiny_settings()).update(two_groups([1.0] * 6), step=1)
    assert policy.num_rows_seen == 0
    assert torch.equal(policy.table.weight, torch.zeros(4, 4))
    assert metrics["train/num_tokens"] == 0


@pytest.mark.parametrize("spoilt", [math.nan, math.inf])
def test_skipped_steps_count_non_finite_gradients_and_leave_the_policy(
    spoilt: float, tmp_path: Path
) -> None:
    policy, batch = Bigram(), two_groups([1, 0, 0, 1, 1, 0])
    settings = tiny_settings(trainer__max_skipped_steps=3)
    trained = Learner(
        policy,  # type: ignore[arg-type]
        settings.algorithm,
        settings.trainer,
        skipped_directory=tmp_path / "skipped",
    )
    hook = policy.table.weight.register_hook(lambda gradient: gradient * spoilt)
    metrics = trained.update(batch, step=1)
    assert metrics["train/skipped_steps"] == 2
    assert "train/loss" not in metrics
    assert torch.equal(policy.table.weight, torch.zeros(4, 4))
    assert len(list((tmp_path / "skipped").iterdir())) == 2
    with pytest.raises(NonFiniteGradientError, match="3 optimizer steps in a row"):
        trained.update(batch, step=2)
    hook.remove()
    metrics = trained.update(batch, step=2)
    assert metrics["train/skipped_steps"] == 0
    assert math.isfinite(metrics["train/loss"])
    assert policy.table.weight[1, 2] > 0 > policy.table.weight[1, 3]


def test_shuffle_rewards_permutes_the_rewards() -> None:
    torch.manual_seed(0)
    settings = tiny_settings(algorithm__shuffle_rewards=True)
    gains = []
    for _ in range(40):
        policy = Bigram()
        learner(policy, settings).update(two_groups([1, 0, 0, 1, 1, 0]), step=1)
        weights = policy.table.weight[1].tolist()
        gains.append(weights[2] - weights[3])
    assert min(gains) < 0 < max(gains)


def test_shuffle_rewards_leaves_failed_rollouts_out() -> None:
    torch.manual_seed(0)
    settings = tiny_settings(algorithm__shuffle_rewards=True)
    metrics = learner(Bigram(), settings).update(two_groups([1, 0, None, 1, None, 0]), step=1)
    assert metrics["train/num_tokens"] <= 4


def test_learning_rate_at_rises_then_falls_to_its_final_fraction() -> None:
    trainer = tiny_settings(
        trainer__num_steps=11, trainer__warmup_steps=2, trainer__learning_rate=1.0
    ).trainer
    rates = [learning_rate_at(step, trainer) for step in (1, 2, 11, 12)]
    assert rates == pytest.approx([0.5, 1.0, 0.1, 0.1])


def test_decoupled_step_clips_around_the_policy_at_its_start() -> None:
    """The rollouts are far from the uniform policy: sampled at 0.1, where it gives 0.25."""
    batch, settings = two_groups([1, 0, 0, 1, 1, 0]), tiny_settings(algorithm__decoupled=True)
    stale = replace(batch, behaviour_logprobs_BT=torch.full_like(batch.behaviour_logprobs_BT, -2.3))
    clipped = learner(Bigram(), tiny_settings()).update(stale, step=1)
    free = learner(Bigram(), settings).update(stale, step=1)
    assert clipped["train/clip_ratio/region_mean"] > 0 == free["train/clip_ratio/region_mean"]
    assert free["train/sampling/importance_sampling_ratio/mean"] == 2  # 2.5, truncated


def test_decoupled_step_treats_current_tokens_on_old_kv_as_stale() -> None:
    fresh, settings = two_groups([1, 0, 0, 1, 1, 0], 1), tiny_settings(algorithm__decoupled=True)
    batch = replace(
        fresh,
        kv_lag_BT=torch.full_like(fresh.kv_lag_BT, 2),
        behaviour_logprobs_BT=torch.full_like(fresh.behaviour_logprobs_BT, -2.3),
    )
    metrics = learner(Bigram(), settings).update(batch, step=1)
    assert metrics["train/sampling/importance_sampling_ratio/mean"] == 2  # 2.5, truncated


def test_loss_correction_weighs_fresh_rollouts_too() -> None:
    settings = tiny_settings(
        algorithm__decoupled=True, algorithm__loss__correction__mode="truncate"
    )
    batch = two_groups([1, 0, 0, 1, 1, 0], version=1)
    metrics = learner(Bigram(), settings).update(batch, step=1)
    assert metrics["train/sampling/importance_sampling_ratio/mean"] == pytest.approx(1.0)


def test_kl_term_is_towards_the_reference_policy() -> None:
    settings = tiny_settings(algorithm__loss__kl_coefficient=0.04, algorithm__num_minibatches=1)
    policy, reference = learner(Bigram(), settings), Bigram()
    with torch.no_grad():  # it answers 1 with 2 at 1/2, with 3 at 1/6; the policy both at 1/4
        reference.table.weight[1, 2] = math.log(3.0)
    policy.reference = ReferencePolicy(reference)
    metrics = policy.update(two_groups([1, 0, 0, 1, 1, 0]), step=1)
    by_token = [ratio - 1 - math.log(ratio) for ratio in (2.0, 2.0 / 3.0)]
    assert metrics["train/kl"] == pytest.approx(sum(by_token) / 2, rel=1e-5)


def test_train_entropy_is_the_policys_over_all_tokens() -> None:
    settings, policy = tiny_settings(algorithm__num_minibatches=1), Bigram()
    with torch.no_grad():  # it answers 1 with 2 at 5/8, with the three others at 1/8
        policy.table.weight[1, 2] = math.log(5.0)
    metrics = learner(policy, settings).update(two_groups([1, 0, 0, 1, 1, 0]), step=1)
    expected = 5 / 8 * math.log(8 / 5) + 3 / 8 * math.log(8)
    assert metrics["train/entropy"] == pytest.approx(expected)


def test_entropy_coefficient_flattens_the_answers() -> None:
    entropies = []
    for coefficient in (0.0, 1.0):
        torch.manual_seed(0)
        policy = Bigram()
        settings = tiny_settings(
            algorithm__num_minibatches=1, algorithm__loss__entropy_coefficient=coefficient
        )
        with torch.no_grad():
            policy.table.weight[1, 2] = math.log(5.0)
        trained = learner(policy, settings)
        for step in range(1, 4):
            trained.update(two_groups([1, 0, 0, 1, 1, 0]), step=step)
        answers = torch.distributions.Categorical(logits=policy.table.weight[1].detach())
        entropies.append(float(answers.entropy()))
    assert entropies[1] > entropies[0]


def test_decoupled_step_on_fresh_rollouts_is_the_plain_step() -> None:
    batch, tables = two_groups([1, 0, 0, 1, 1, 0], version=1), []
    for is_decoupled in (False, True):
        torch.manual_seed(0)
        policy = Bigram()
        settings = tiny_settings(algorithm__decoupled=is_decoupled)
        learner(policy, settings).update(batch, step=1)
        assert policy.num_rows_seen == 6
        tables.append(policy.table.weight)
    assert torch.equal(*tables)
