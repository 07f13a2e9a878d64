"""The job through the real engine, cut down to seconds: files, staleness, interruption, resume."""

import json
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("reasoning_gym")

from transformers import AutoModelForCausalLM, AutoTokenizer

from examples.grpo.interrupt import stop_on_interrupt
from examples.grpo.loop import train
from examples.grpo.run import open_run
from examples.train_grpo import run_seed
from rollout import ConfigError, EngineState, RolloutError
from tests.examples.grpo_settings import tiny_settings
from trainer_hooks.checkpoint import read_trainer_state
from trainer_hooks.metrics import read_jsonl


def training_rows(directory: Path) -> list[dict[str, Any]]:
    return [row for row in read_jsonl(directory / "metrics.jsonl") if "reward" in row]


def test_a_run_leaves_curve_metrics_summary_and_a_policy_that_transformers_loads(
    tmp_path: Path,
) -> None:
    directory = tmp_path / "seed_0"
    summary = run_seed(directory, tiny_settings(), seed=0)
    assert json.loads((directory / "summary.json").read_text())["num_steps"] == 4
    assert (directory / "reward_curve.png").read_bytes().startswith(b"\x89PNG")
    rows = training_rows(directory)
    assert [row["trainer/step"] for row in rows] == [1, 2, 3, 4]
    assert summary.stale_token_fraction > 0.0
    assert {"reward_std", "kv_cache_staleness/mean", "timing_s/suspend"} <= set(rows[0])
    assert any(name.startswith("engine/") for name in rows[0])

    saved = directory / "checkpoints" / "step_000004"
    tokenizer = AutoTokenizer.from_pretrained(saved)
    tokens = tokenizer("a, b, a", return_tensors="pt").input_ids
    assert AutoModelForCausalLM.from_pretrained(saved)(tokens).logits.isfinite().all()


def test_unfinished_groups_go_on_under_the_next_weights(tmp_path: Path) -> None:
    settings = tiny_settings()
    with open_run(tmp_path / "run", settings, seed=0) as run:
        with run.phase():
            run.sampler.collect()
        assert run.llm.state is EngineState.SUSPENDED
        first = run.llm.weights_version
        unfinished = run.sampler.state_dict()["unfinished"]
        assert len(unfinished) == 2
        with run.phase():
            groups = run.sampler.collect()
        taken_up = [group for group in groups if group.problem.index in unfinished]
        versions = torch.cat([r.policy_versions for group in taken_up for r in group.requests])
    assert run.llm.weights_version == first + 1
    assert set(versions.tolist()) <= {first, first + 1}
    assert first in versions


def test_an_interrupted_run_resumes_to_the_end_under_higher_versions(tmp_path: Path) -> None:
    directory = tmp_path / "seed_0"
    run_seed(directory, tiny_settings(trainer__num_steps=3, trainer__checkpoint_interval=2), seed=0)
    # What a kill in step 3 leaves: the metrics and the version of a step that no checkpoint has.
    shutil.rmtree(directory / "checkpoints" / "step_000003")
    killed_version = training_rows(directory)[-1]["rollout/version"]
    saved = read_trainer_state(directory / "checkpoints" / "step_000002")
    assert len(saved.prompts["unfinished"]) == 2

    summary = run_seed(directory, tiny_settings(resume="auto"), seed=0)
    rows = training_rows(directory)
    assert [row["trainer/step"] for row in rows] == [1, 2, 3, 4]
    assert rows[2]["rollout/version"] > killed_version
    assert summary.num_steps == 4


def test_the_kl_terms_reference_is_what_the_warm_up_left_and_outlives_a_resume(
    tmp_path: Path,
) -> None:
    directory, changes = tmp_path / "seed_0", {"trainer__checkpoint_interval": 1}
    with_kl = {**changes, "algorithm__loss__kl_coefficient": 0.04}
    run_seed(directory, tiny_settings(**with_kl, trainer__num_steps=1), seed=0)
    reference, warmed_up, trained = (
        AutoModelForCausalLM.from_pretrained(directory / path).lm_head.weight
        for path in ("reference", "checkpoints/step_000000", "checkpoints/step_000001")
    )
    assert torch.equal(reference, warmed_up)
    assert not torch.equal(reference, trained)

    run_seed(directory, tiny_settings(**with_kl, trainer__num_steps=2, resume="auto"), seed=0)
    rows = [row for row in training_rows(directory) if "train/loss" in row]
    assert rows
    assert all(row["train/kl"] > 0.0 for row in rows)
    kept = AutoModelForCausalLM.from_pretrained(directory / "reference").lm_head.weight
    assert torch.equal(reference, kept)


def test_a_kl_term_that_comes_with_a_resume_is_refused(tmp_path: Path) -> None:
    directory = tmp_path / "seed_0"
    run_seed(directory, tiny_settings(trainer__num_steps=1), seed=0)
    settings = tiny_settings(resume="auto", algorithm__loss__kl_coefficient=0.04)
    with pytest.raises(ConfigError, match=r"kl_coefficient=0\.04.*reference.*resume=never"):
        run_seed(directory, settings, seed=0)


def test_ctrl_c_writes_a_checkpoint_at_the_step_edge(tmp_path: Path) -> None:
    with open_run(tmp_path / "run", tiny_settings(), seed=0) as run:
        signal.raise_signal(signal.SIGINT)
        assert run.stop.is_set()
        with pytest.raises(KeyboardInterrupt):
            train(run)
    assert run.llm.state is EngineState.STOPPED
    state = read_trainer_state(tmp_path / "run" / "checkpoints" / "step_000000")
    assert state.step == 0
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_second_ctrl_c_acts_as_ever() -> None:
    with stop_on_interrupt() as stop:
        signal.raise_signal(signal.SIGINT)
        assert stop.is_set()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_a_run_that_starts_over_sets_the_earlier_one_aside(tmp_path: Path) -> None:
    directory = tmp_path / "seed_0"
    for text in ("first", "second"):
        with open_run(directory, tiny_settings(), seed=0):
            assert not (directory / "note").exists()
            (directory / "note").write_text(text)
    assert (tmp_path / "seed_0.previous" / "note").read_text() == "first"


def test_a_warm_up_that_does_not_get_there_says_what_to_change(tmp_path: Path) -> None:
    settings = tiny_settings(warmup__target_reward=1.0, warmup__max_steps=2)
    with pytest.raises(RolloutError, match=r"warmup\.max_steps"):
        run_seed(tmp_path / "seed_0", settings, seed=0)


def test_a_warm_up_that_ends_before_its_first_check_measures_what_it_reached(
    tmp_path: Path,
) -> None:
    settings = tiny_settings(warmup__target_reward=1.0, warmup__max_steps=3, warmup__first_check=60)
    with pytest.raises(RolloutError, match=r"a sampled reward of 0\.\d{3} in 3 steps"):
        run_seed(tmp_path / "seed_0", settings, seed=0)


def test_a_warm_up_without_a_step_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"max_steps=0"):
        tiny_settings(warmup__max_steps=0)


def test_the_engine_logs_into_the_run_if_it_logs_at_all(tmp_path: Path) -> None:
    settings = tiny_settings(logger__engine_step_interval=1)
    with open_run(tmp_path / "run", settings, seed=0) as run, run.phase():
        run.sampler.collect()
    rows = read_jsonl(tmp_path / "run" / "metrics.jsonl")
    assert any("engine/last_step/num_running" in row for row in rows)
