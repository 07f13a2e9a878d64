"""Every algorithm of conf/ trains through the job, and every setting of one by overrides."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from rollout import ConfigError
from tests.installed import needs
from tests.trainer_hooks.fakes import finished_request
from tests.trainer_hooks.train.grpo_settings import tiny_settings
from trainer_hooks import (
    ReferencePolicy,
    RolloutBatch,
    ScoredGroup,
    collate_rollouts,
    read_trainer_state,
)
from trainer_hooks.metrics import read_jsonl
from trainer_hooks.prompts.history import PromptHistory
from trainer_hooks.train.job import CONFIG_DIRECTORY
from trainer_hooks.train.learner import Learner
from trainer_hooks.train.main import run_seed

pytestmark = needs("reasoning_gym")

LEAVES = sorted(path.stem for path in CONFIG_DIRECTORY.glob("algorithm/*.yaml"))
SHAPE: dict[str, int] = {
    "vocab_size": 32, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8,
}  # fmt: skip
HERE = "tests.trainer_hooks.train.test_algorithm_steps"


def training_rows(directory: Path) -> list[dict[str, Any]]:
    return [row for row in read_jsonl(directory / "metrics.jsonl") if "reward" in row]


def batch_of_two_groups(group_size: int) -> RolloutBatch:
    """Return rollouts of several lengths and an older version; the last rollout of each group was
    cut.
    """
    generator, requests = torch.Generator().manual_seed(0), []
    for number in range(2 * group_size):
        ids = torch.randint(SHAPE["vocab_size"], (3 + number,), generator=generator).tolist()
        request = finished_request([1, 2], ids, versions=[0] * len(ids), logprobs=[-3.0] * len(ids))
        request.finish_reason = "length" if number % group_size == group_size - 1 else "stop"
        requests.append(request)
    return collate_rollouts(requests, [float(i % 3) for i in range(len(requests))], train_version=1)


def update(**changes: Any) -> tuple[dict[str, float], bool]:
    """Return the metrics of one step of the learner, and whether the policy changed."""
    settings = tiny_settings(**changes)
    torch.manual_seed(0)
    policy = Qwen3ForCausalLM(Qwen3Config(**SHAPE))
    before, reference = policy.lm_head.weight.clone(), None
    if settings.algorithm.needs_reference:
        with_noise = Qwen3ForCausalLM(Qwen3Config(**SHAPE))
        reference = ReferencePolicy.copy_of(with_noise, settings.algorithm.reference)
    learner = Learner(policy, settings.algorithm, settings.trainer, reference)
    metrics = learner.update(batch_of_two_groups(settings.algorithm.group_size), step=9)
    assert all(math.isfinite(value) for value in metrics.values())
    return metrics, not torch.equal(before, policy.lm_head.weight)


@pytest.mark.drawn(4)
@pytest.mark.parametrize("leaf", LEAVES)
def test_every_algorithm_trains_a_step(leaf: str) -> None:
    sizes = {"algorithm__group_size": 1} if leaf == "ppo" else {}
    metrics, has_changed = update(algorithm=leaf, **sizes)
    assert has_changed
    assert metrics["train/grad_norm"] > 0.0
    assert ("train/vf_loss" in metrics) == (leaf == "ppo")


@pytest.mark.drawn(3)
@pytest.mark.parametrize(
    ("changes", "metric"),
    [
        ({"algorithm": "reinforce_plus_plus"}, "train/loss"),
        ({"algorithm__reward_kl_coefficient": 0.1}, "train/loss"),
        ({"algorithm__loss__kl_coefficient": 0.1}, "train/kl"),
        ({"algorithm__loss__entropy_coefficient": 0.1}, "train/entropy"),
        ({"algorithm__loss__max_sequence_kl": 0.01}, "train/sequence_mask_fraction"),
        ({"algorithm__num_iterations": 2}, "train/loss"),
        ({"algorithm__advantage_estimator": "reinforce_plus_plus_baseline"}, "train/loss"),
        ({"algorithm__mask_truncated_completions": True}, "train/loss"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_every_algorithm_setting_can_be_overridden(changes: dict[str, Any], metric: str) -> None:
    plain, _ = update(algorithm__decoupled=True)
    metrics, has_changed = update(algorithm__decoupled=True, **changes)
    assert has_changed
    assert metric in metrics
    assert metrics["train/grad_norm"] != plain["train/grad_norm"]


@pytest.mark.parametrize("leaf", ["demo", "ppo", "reinforce_plus_plus"])
def test_max_tokens_per_forward_does_not_change_the_step(leaf: str) -> None:
    sizes = {"algorithm__group_size": 1} if leaf == "ppo" else {"algorithm__group_size": 4}
    kl = {"algorithm__reward_kl_coefficient": 0.1, "algorithm__num_minibatches": 1}
    plain, _ = update(algorithm=leaf, **sizes, **kl)
    for is_packed in (False, True):
        cut = {"algorithm__max_tokens_per_forward": 25, "algorithm__is_packed": is_packed}
        metrics, _ = update(algorithm=leaf, **sizes, **kl, **cut)
        for name in plain:
            assert metrics[name] == pytest.approx(plain[name], rel=1e-4, abs=1e-6), name


def test_mask_truncated_completions_leaves_cut_rollouts_out() -> None:
    plain, _ = update()
    masked, _ = update(algorithm__mask_truncated_completions=True)
    assert masked["train/num_tokens"] == plain["train/num_tokens"] - (3 + 2) - (3 + 5)


def first_letter(completion: str) -> str:
    return completion[:1]


def prefers_even_rows(index: int, history: PromptHistory, other: float) -> float:
    return (1.0 if index % 2 == 0 else other) / (1 + history.num_issued)


def is_negative(group: ScoredGroup, history: PromptHistory) -> str | None:
    return "negative" if group.mean_reward < 0.0 else None


def test_resumed_run_with_all_features_equals_an_uninterrupted_run(tmp_path: Path) -> None:
    """Weights are synchronised by suspending, so that no token depends on the trainer's speed."""
    changes = {
        "producer": "synchronous",
        "producer__curriculum__path": f"{HERE}:prefers_even_rows",
        "producer__curriculum__options__other": 0.0,
        "producer__group_filters__sign__path": f"{HERE}:is_negative",
        "algorithm__num_iterations": 2,
        "algorithm__max_tokens_per_forward": 80,
        "algorithm__is_packed": True,
        "algorithm__loss__kl_coefficient": 0.1,
        "algorithm__reference__sync_interval": 1,
        "algorithm__reference__sync_weight": 0.3,
        "trainer__scheduler__path": "torch.optim.lr_scheduler:CosineAnnealingLR",
        "trainer__scheduler__options__T_max": 6,
        "trainer__learning_rate": 1e-2,
    }
    seen, weights = [], []
    for resume in ("never", "auto"):
        run_seed(tmp_path / "seed_0", tiny_settings(**changes, resume=resume), seed=0)
        rows = training_rows(tmp_path / "seed_0")
        names = ("reward", "train/loss", "train/kl", "train/learning_rate")
        seen.append([[row.get(name) for name in names] for row in rows])
        end = tmp_path / "seed_0" / "checkpoints" / "step_000004"
        weights.append(AutoModelForCausalLM.from_pretrained(end).lm_head.weight)
        histories = read_trainer_state(end).prompts["histories"]
        assert {row for row, *_ in histories} <= set(range(0, 100_000, 2)), "even rows alone"
        shutil.rmtree(end)  # what a kill before the last checkpoint leaves
    assert seen[0] == seen[1]
    assert torch.equal(*weights)
    rates = [rate for *_, rate in seen[0]]
    assert rates == pytest.approx([5e-3 * (1 + math.cos(math.pi * i / 6)) for i in range(4)])


def test_trainer_evaluation_reports_pass_at_k_and_maj_at_n(tmp_path: Path) -> None:
    changes = {
        "trainer__num_steps": 2, "trainer__eval_interval": 1, "trainer__evaluation__n": 4,
        "trainer__evaluation__pass_at": "[1,4]", "trainer__evaluation__success_reward": 0.02,
        "trainer__evaluation__answer__path": f"{HERE}:first_letter",
    }  # fmt: skip
    run_seed(tmp_path, tiny_settings(warmup="none", **changes), seed=0)
    rows = [row for row in read_jsonl(tmp_path / "metrics.jsonl") if "eval/pass@4" in row]
    assert [row["trainer/step"] for row in rows] == [0, 1, 2]
    for row in rows:
        assert 0.0 <= row["eval/pass@1"] <= row["eval/pass@4"] <= 1.0
        assert row["eval/num_samples"] == 4 * row["eval/num_prompts"]
        assert {"eval/greedy_reward", "eval/maj@4", "eval/reward_best_of_n"} <= set(row)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"algorithm__reference__sync_interval": 3}, "sync_interval=3 without a KL term"),
        ({"algorithm__reference__sync_weight": 0.3}, "sync_weight=0.3 without sync_interval"),
        ({"algorithm__num_iterations": 0}, "num_iterations=0 must be .*at least 1"),
        ({"algorithm__reward_kl_coefficient": -1.0}, "reward_kl_coefficient=-1.0 must"),
        (
            {"algorithm": "ppo", "algorithm__group_size": 1,
             "algorithm__advantage_estimator": "reinforce_plus_plus"},
            "advantage_estimator='reinforce_plus_plus' with algorithm.critic",
        ),
        ({"trainer__evaluation__pass_at": "[2]"}, r"pass_at=\[2\] must be from 1 to n=0"),
    ],
)  # fmt: skip
def test_contradicting_job_settings_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        tiny_settings(**changes)


def test_trainer_scheduler_with_unknown_options_is_refused() -> None:
    changes = {
        "trainer__scheduler__path": "torch.optim.lr_scheduler:CosineAnnealingLR",
        "trainer__scheduler__options__T_min": 6,
    }
    with pytest.raises(ConfigError, match=r"trainer.scheduler.options={'T_min': 6}.*T_min"):
        update(**changes)
