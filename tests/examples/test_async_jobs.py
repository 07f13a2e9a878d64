"""Asynchronous GRPO and PPO through real engine processes, cut down to seconds."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")
pytest.importorskip("reasoning_gym")

from hydra import compose, initialize_config_module
from hydra.core.global_hydra import GlobalHydra
from transformers import AutoModelForCausalLM

from examples.grpo.async_loop import run_async
from examples.grpo.learner import make_grpo_learner
from examples.grpo.settings import JobSettings
from examples.ppo.learner import make_ppo_learner
from examples.ppo.settings import PpoJobSettings
from rollout import ConfigError
from tests.examples.grpo_settings import TINY
from trainer_hooks.checkpoint import find_checkpoint, read_trainer_state
from trainer_hooks.config_loading import load_dataclass
from trainer_hooks.hydra_job import checked_overrides
from trainer_hooks.metrics import read_jsonl

WITH_KL = {"algorithm__loss__kl_coefficient": 0.04}


def settings_of(job: str, **changes: Any) -> Any:
    values = {**TINY, **{name.replace("__", "."): value for name, value in changes.items()}}
    GlobalHydra.instance().clear()
    kind = {"train_grpo": JobSettings, "train_ppo": PpoJobSettings}[job]
    overrides = checked_overrides([f"{name}={value}" for name, value in values.items()], kind)
    with initialize_config_module(config_module="conf", version_base="1.3"):
        return load_dataclass(kind, compose(job, overrides))


def rows_of(directory: Path) -> list[dict[str, Any]]:
    return [row for row in read_jsonl(directory / "metrics.jsonl") if "reward" in row]


@pytest.mark.parametrize(
    ("bound", "mode"),
    [
        pytest.param(0, "suspend", marks=pytest.mark.slow),
        (2, "in_flight"),
    ],
)
def test_async_grpo_keeps_its_bound_accounts_for_all_its_time_and_leaves_a_policy(
    tmp_path: Path, bound: int, mode: str
) -> None:
    changes = {"producer__max_staleness_versions": bound, "weight_sync": mode, **WITH_KL}
    settings = settings_of("train_grpo", mode="async", **changes)
    asyncio.run(run_async(tmp_path, settings, 0, make_grpo_learner))
    rows = rows_of(tmp_path)
    assert [row["trainer/step"] for row in rows] == [1, 2, 3, 4]
    assert all(row["policy_staleness/max"] <= bound for row in rows)
    assert any(row["policy_staleness/max"] > 0 for row in rows) == (bound > 0)
    for row in rows:
        shares = [value for name, value in row.items() if name.startswith("timing_share/")]
        assert sum(shares) == pytest.approx(1.0, abs=0.01)
        assert 0.0 <= row.get("engine/idle_share", 0.0) <= 1.0
        assert (row["timing_s/suspend"] > 0) == (mode == "suspend")
    assert all("train/kl" in row for row in rows if "train/loss" in row)
    checkpoint = find_checkpoint(tmp_path / "checkpoints")
    assert checkpoint is not None
    assert AutoModelForCausalLM.from_pretrained(checkpoint).config.hidden_size == 16
    issued = read_trainer_state(checkpoint).prompts["ledger"]
    assert issued, "the ledger goes with the checkpoint"


def test_ppo_trains_policy_and_critic_and_a_checkpoint_has_both(tmp_path: Path) -> None:
    sizes = {"algorithm__group_size": 1, "algorithm__groups_per_step": 8}
    settings = settings_of("train_ppo", **sizes, algorithm__groups_in_flight=8, **WITH_KL)
    asyncio.run(run_async(tmp_path, settings, 0, make_ppo_learner))
    rows = rows_of(tmp_path)
    assert len(rows) == 4
    assert {"train/vf_loss", "train/vpred_mean", "train/loss", "train/kl"} <= set(rows[0])
    checkpoint = find_checkpoint(tmp_path / "checkpoints")
    assert checkpoint is not None
    policy = AutoModelForCausalLM.from_pretrained(checkpoint)
    learner = make_ppo_learner(policy, settings, checkpoint)
    assert learner.critic.head.weight.abs().sum() > 0, "its head began at zero"


def test_ppo_with_groups_or_another_loss_is_refused() -> None:
    with pytest.raises(ConfigError, match="group_size=3"):
        settings_of("train_ppo", algorithm__group_size=3)
    with pytest.raises(ConfigError, match="mode='sync'"):
        settings_of("train_ppo", algorithm__group_size=1, mode="sync")
