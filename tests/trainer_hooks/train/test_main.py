"""run_seed through real engines, in seconds: files, staleness, interruption, resume."""

from __future__ import annotations

import asyncio
import json
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from transformers import AutoModelForCausalLM, AutoTokenizer

from rollout import ConfigError
from tests.installed import needs
from tests.trainer_hooks.test_rewards_workers import children
from tests.trainer_hooks.train.grpo_settings import NUM_KINDS, tiny_settings
from tests.trainer_hooks.wandb_files import read_history
from trainer_hooks import RolloutBatch, find_checkpoint, read_trainer_state
from trainer_hooks.metrics import read_jsonl
from trainer_hooks.train import palindromes, warm_up
from trainer_hooks.train.learner import Learner
from trainer_hooks.train.main import Run, run_seed
from trainer_hooks.train.run_files import locked_run
from trainer_hooks.train.threads import use_threads

pytestmark = needs("reasoning_gym")

WITH_KL = {"algorithm__loss__kl_coefficient": 0.04}


def training_rows(directory: Path) -> list[dict[str, Any]]:
    return [row for row in read_jsonl(directory / "metrics.jsonl") if "reward" in row]


def test_run_seed_writes_report_metrics_summary_and_a_checkpoint_for_transformers(
    tmp_path: Path,
) -> None:
    directory = tmp_path / "seed_0"
    summary = run_seed(directory, tiny_settings(), seed=0)
    assert json.loads((directory / "summary.json").read_text())["num_steps"] == 4
    rows = training_rows(directory)
    assert [row["trainer/step"] for row in rows] == [1, 2, 3, 4]
    assert summary["stale_token_fraction"] > 0.0, "rollouts cross updates"
    assert summary["max_staleness"] == 1, "the bound"
    assert {"reward_std", "kv_cache_staleness/mean", "timing_s/suspend"} <= set(rows[0])
    assert any(name.startswith("engine/") for name in rows[0])
    greedy = [row for row in read_jsonl(directory / "metrics.jsonl") if "eval/greedy_reward" in row]
    assert [row["trainer/step"] for row in greedy] == [0, 4]

    saved = directory / "checkpoints" / "step_000004"
    tokenizer = AutoTokenizer.from_pretrained(saved)
    tokens = tokenizer("a, b, a", return_tensors="pt").input_ids
    assert AutoModelForCausalLM.from_pretrained(saved)(tokens).logits.isfinite().all()


@pytest.mark.drawn(1)
@pytest.mark.parametrize(
    ("num_engines", "mode", "bound"),
    [
        (0, "suspend", 0),
        (0, "in_flight", 1),
        pytest.param(1, "suspend", 0, marks=pytest.mark.slow),
        (1, "in_flight", 2),
    ],
)
def test_max_staleness_holds_and_all_time_is_accounted_in_each_weight_sync_mode(
    tmp_path: Path, num_engines: int, mode: str, bound: int
) -> None:
    releases = {"weight_sync__release": "[kv_cache,weights]"} if mode == "suspend" else {}
    settings = tiny_settings(
        num_engines=num_engines,
        weight_sync=mode,
        producer__max_staleness_versions=bound,
        **releases,
        **WITH_KL,
    )
    run_seed(tmp_path, settings, seed=0)
    rows = training_rows(tmp_path)
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
    assert read_trainer_state(checkpoint).prompts, "the ledger goes with the checkpoint"


def test_run_seed_restores_the_threads_from_which_the_next_seed_counts(tmp_path: Path) -> None:
    before = torch.get_num_threads()
    endless = {"warmup__max_steps": 1, "warmup__first_check": 1, "warmup__target_reward": 9.0}
    use_threads(before + 1)
    try:
        with pytest.raises(ConfigError, match="the warm-up reached"):
            run_seed(tmp_path, tiny_settings(**endless, trainer__num_threads=before + 2), seed=0)
        assert torch.get_num_threads() == before + 1
    finally:
        use_threads(before)


def test_reward_workers_end_with_the_run(tmp_path: Path) -> None:
    changes = {"reward__workers": 1, "warmup": "none", "trainer__num_steps": 1}
    run, before = Run(tmp_path, tiny_settings(**changes), seed=0), children()
    asyncio.run(run.run())
    assert len(training_rows(tmp_path)) == 1
    assert children() == before


def test_ppo_trains_policy_and_critic_and_checkpoints_both(tmp_path: Path) -> None:
    sizes = {"algorithm__group_size": 1, "algorithm__groups_per_step": 8}
    settings = tiny_settings(algorithm="ppo", **sizes, **WITH_KL)
    run_seed(tmp_path, settings, seed=0)
    rows = training_rows(tmp_path)
    assert len(rows) == 4
    assert {"train/vf_loss", "train/vpred_mean", "train/loss", "train/kl"} <= set(rows[0])
    checkpoint = find_checkpoint(tmp_path / "checkpoints")
    assert checkpoint is not None
    critic = Learner.load(checkpoint, settings)[0].critic
    assert critic is not None
    assert critic.head.weight.abs().sum() > 0, "its head began at zero"


def test_interrupted_run_resumes_to_the_end_under_higher_weights_versions(tmp_path: Path) -> None:
    directory = tmp_path / "seed_0"
    run_seed(directory, tiny_settings(trainer__num_steps=3, trainer__checkpoint_interval=2), seed=0)
    # What a kill in step 3 leaves: the metrics and the version of a step that no checkpoint has.
    shutil.rmtree(directory / "checkpoints" / "step_000003")
    killed_version = training_rows(directory)[-1]["rollout/version"]
    saved = read_trainer_state(directory / "checkpoints" / "step_000002")
    assert saved.prompts["unfinished"], "those of the batch that was generated beside step 2"

    summary = run_seed(directory, tiny_settings(resume="auto"), seed=0)
    rows = training_rows(directory)
    assert [row["trainer/step"] for row in rows] == [1, 2, 3, 4]
    assert rows[2]["rollout/version"] > killed_version
    assert summary["num_steps"] == 4
    batches = [tuple(p) for row in read_jsonl(directory / "batches.jsonl") for p in row["prompts"]]
    assert len(set(batches)) == len(batches) == 16, "each prompt is trained on once"


def test_kl_reference_is_the_warmed_up_policy_also_after_a_resume(
    tmp_path: Path,
) -> None:
    directory, with_kl = tmp_path / "seed_0", {"trainer__checkpoint_interval": 1, **WITH_KL}
    with_kl["reward"] = NUM_KINDS
    run_seed(directory, tiny_settings(**with_kl, trainer__num_steps=1), seed=0)
    reference, warmed_up, trained = (
        AutoModelForCausalLM.from_pretrained(directory / path).lm_head.weight
        for path in ("reference", "checkpoints/step_000000", "checkpoints/step_000001")
    )
    assert torch.equal(reference, warmed_up)
    assert not torch.equal(reference, trained)

    run_seed(directory, tiny_settings(**with_kl, trainer__num_steps=2, resume="auto"), seed=0)
    rows = [row for row in training_rows(directory) if "train/loss" in row]
    assert rows[-1]["trainer/step"] == 2
    assert all(row["train/kl"] > 0.0 for row in rows[1:])
    kept = AutoModelForCausalLM.from_pretrained(directory / "reference").lm_head.weight
    assert torch.equal(reference, kept)


def test_kl_coefficient_added_on_resume_is_refused(tmp_path: Path) -> None:
    directory = tmp_path / "seed_0"
    run_seed(directory, tiny_settings(trainer__num_steps=1), seed=0)
    settings = tiny_settings(resume="auto", **WITH_KL)
    with pytest.raises(ConfigError, match=r"kl_coefficient=0\.04.*reference.*resume=never"):
        run_seed(directory, settings, seed=0)


def test_resume_from_step_0_repeats_a_fresh_run_exactly(tmp_path: Path) -> None:
    # By turns, so that no token depends on how quick the trainer is.
    by_turns = {"producer": "synchronous", "trainer__num_steps": 2}
    directory, rewards, weights = tmp_path / "seed_0", [], []
    for resume in ("never", "auto"):
        run_seed(directory, tiny_settings(**by_turns, resume=resume), seed=0)
        rows = training_rows(directory)
        rewards.append([(row["reward"], row.get("train/loss")) for row in rows])
        end = directory / "checkpoints" / "step_000002"
        weights.append(AutoModelForCausalLM.from_pretrained(end).lm_head.weight)
        shutil.rmtree(end)  # what a kill before the first checkpoint of a step leaves
    assert len(rewards[0]) == 2
    assert rewards[0] == rewards[1]
    assert torch.equal(*weights)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model__hidden_size": 32}, r"model\.hidden_size=32.*step_000001 has 16.*run_name"),
        ({"algorithm": "ppo", "algorithm__group_size": 1}, r"step_000001 has an optimizer of \["),
    ],
    ids=["policy", "critic"],
)
def test_resume_with_another_model_or_optimizer_is_refused(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    directory = tmp_path / "seed_0"
    run_seed(directory, tiny_settings(trainer__num_steps=1), seed=0)
    with pytest.raises(ConfigError, match=message):
        run_seed(directory, tiny_settings(resume="auto", **changes), seed=0)


def test_ctrl_c_during_warm_up_leaves_no_checkpoint_and_the_next_run_starts_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, answer_loss = tmp_path / "seed_0", warm_up.answer_loss

    def interrupted_loss(*given: Any) -> torch.Tensor:
        signal.raise_signal(signal.SIGINT)
        return answer_loss(*given)

    with monkeypatch.context() as patch:
        patch.setattr(warm_up, "answer_loss", interrupted_loss)
        with pytest.raises(KeyboardInterrupt):
            run_seed(directory, tiny_settings(), seed=0)
    assert [row["warmup/step"] for row in read_jsonl(directory / "metrics.jsonl")] == [1]
    assert "warm-up: loss" in (directory / "report.html").read_text()
    assert find_checkpoint(directory / "checkpoints") is None
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    summary = run_seed(directory, tiny_settings(trainer__num_steps=1, resume="auto"), seed=0)
    assert summary["num_steps"] == 1


def test_ctrl_c_writes_a_checkpoint_between_two_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    update = Learner.update

    def interrupted_update(self: Learner, batch: RolloutBatch, step: int) -> dict[str, float]:
        if step == 1:
            signal.raise_signal(signal.SIGINT)
        return update(self, batch, step)

    monkeypatch.setattr(Learner, "update", interrupted_update)
    with pytest.raises(KeyboardInterrupt):
        run_seed(tmp_path, tiny_settings(trainer__checkpoint_interval=4), seed=0)
    checkpoint = find_checkpoint(tmp_path / "checkpoints")
    assert checkpoint is not None
    assert read_trainer_state(checkpoint).step == 1
    assert "Curves" in (tmp_path / "report.html").read_text()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_warm_up_and_training_share_one_wandb_run_with_sample_tables(
    tmp_path: Path,
) -> None:
    pytest.importorskip("wandb")
    run_seed(tmp_path, tiny_settings(logger__wandb="offline", trainer__num_steps=1), seed=0)
    (own,) = tmp_path.glob("wandb/offline-run-*")
    assert f"<code>wandb sync {own}" in (tmp_path / "report.html").read_text()
    rows = read_history(tmp_path)
    assert any("warmup/step" in row for row in rows)
    assert any("reward" in row for row in rows)
    (drawn,) = [row for row in rows if "completions/path" in row]
    files = next(tmp_path.glob("wandb/offline-run-*/files"))
    table = json.loads((files / drawn["completions/path"]).read_text())
    written = {row["completion"] for row in read_jsonl(tmp_path / "completions.jsonl")}
    shown = {cells[table["columns"].index("completion")] for cells in table["data"]}
    assert shown
    assert shown <= written


def test_run_that_starts_over_renames_the_earlier_directory_and_names_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = tmp_path / "seed_0"
    for text in ("first", "second", "third"):
        run_seed(directory, tiny_settings(trainer__num_steps=1, logger__console=True), seed=0)
        shown = capsys.readouterr().out
        assert not (directory / "note").exists()
        (directory / "note").write_text(text)
    assert (tmp_path / "seed_0.previous" / "note").read_text() == "first"
    assert (tmp_path / "seed_0.previous-2" / "note").read_text() == "second"
    assert find_checkpoint(tmp_path / "seed_0.previous" / "checkpoints") is not None
    for line in (
        "model      random weights, 2.11k parameters, trained in float32, served in float32",
        "prompts    50,000 to train on, 4 held out",
        "steps      1 of 4 groups x 3 samples, each of up to 30 tokens",
        f"files      {directory} (config.yaml has all settings)",
        f"earlier    {directory}.previous, {directory}.previous-2",
    ):
        assert line in shown.splitlines(), shown
    assert "block_size_tokens" not in shown, "the whole config is in config.yaml"
    assert "block_size_tokens" in (directory / "config.yaml").read_text()


def test_job_in_a_locked_run_directory_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    directory = tmp_path / "seed_0"
    with locked_run(directory):
        directory.mkdir()
        for resume in ("never", "auto"):
            with pytest.raises(ConfigError, match=r"another job \(process .* run_name of its own"):
                run_seed(directory, tiny_settings(resume=resume), seed=0)
        assert list(directory.iterdir()) == []


def test_warm_up_that_misses_target_reward_names_the_settings_to_change(tmp_path: Path) -> None:
    settings = tiny_settings(warmup__target_reward=1.0, warmup__max_steps=2)
    with pytest.raises(ConfigError, match=r"warmup\.max_steps"):
        run_seed(tmp_path / "seed_0", settings, seed=0)


def test_warm_up_that_ends_before_first_check_measures_its_reward(
    tmp_path: Path,
) -> None:
    settings = tiny_settings(warmup__target_reward=1.0, warmup__max_steps=3, warmup__first_check=60)
    with pytest.raises(ConfigError, match=r"a sampled reward of 0\.\d{3} in 3 steps"):
        run_seed(tmp_path / "seed_0", settings, seed=0)


def test_warm_up_reuses_its_prompts_from_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(palindromes, "NUM_PROMPTS", 5)  # it takes 4 for each of 2 steps
    run_seed(tmp_path, tiny_settings(trainer__num_steps=1), seed=0)
    rows = [row for row in read_jsonl(tmp_path / "metrics.jsonl") if "warmup/step" in row]
    assert [row["warmup/step"] for row in rows] == [1, 2]


def test_job_without_warm_up_trains_from_the_given_policy(
    tmp_path: Path,
) -> None:
    summary = run_seed(tmp_path, tiny_settings(warmup="none", trainer__num_steps=1), seed=0)
    rows = read_jsonl(tmp_path / "metrics.jsonl")
    assert not any("warmup/step" in row for row in rows)
    assert [row["trainer/step"] for row in rows if "eval/greedy_reward" in row] == [0, 1]
    assert "warmup_steps" not in summary


def test_negative_warmup_max_steps_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"max_steps=-1"):
        tiny_settings(warmup__max_steps=-1)


TINY_EXPERTS = {
    "model__num_experts": 4,
    "model__num_experts_per_tok": 2,
    "model__moe_intermediate_size": 8,
}


def test_replay_routing_trains_with_the_experts_of_the_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    batches: list[RolloutBatch] = []
    update = Learner.update

    def observed(learner: Learner, batch: RolloutBatch, step: int) -> dict[str, float]:
        batches.append(batch)
        return update(learner, batch, step)

    monkeypatch.setattr(Learner, "update", observed)
    settings = tiny_settings(model="tiny_moe", algorithm__replay_routing=True, **TINY_EXPERTS)
    run_seed(tmp_path, settings, seed=0)
    assert len(training_rows(tmp_path)) == 4
    for batch in batches:
        assert batch.routing_BTLK is not None
        assert batch.routing_BTLK.shape == (*batch.tokens_BT.shape, 1, 2)
        is_before_last_BT = batch.attention_mask_BT.roll(-1, dims=1) & batch.attention_mask_BT
        is_before_last_BT[:, -1] = False
        is_known_BT = (batch.routing_BTLK >= 0).all(dim=-1).all(dim=-1)
        assert torch.equal(is_known_BT, is_before_last_BT), "all but the last token of each row"
