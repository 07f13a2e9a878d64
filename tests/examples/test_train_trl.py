"""TRL's GRPOTrainer over the real engine, cut down to seconds."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("reasoning_gym")
pytest.importorskip("trl")

from examples.grpo.policy import build_policy, build_tokenizer
from examples.grpo.task import PalindromeTask, ProblemStream
from examples.train_trl import TrainerFactory, TrlJobSettings, reward_summary, run_job
from rollout import LLM, ConfigError, EngineState, InferenceConfig, RolloutError
from tests.examples.grpo_settings import tiny_settings
from trainer_hooks.trl_rollouts import TRLRollouts, sampling_params_of


def trl_settings() -> TrlJobSettings:
    tiny = tiny_settings()
    return TrlJobSettings(
        run_name="test",
        seed=0,
        num_threads=1,
        num_steps=3,
        num_minibatches=2,
        compare_steps=0,
        groups_per_step=4,
        group_size=4,
        max_new_tokens=6,
        learning_rate=1e-3,
        num_prompts=100,
        engine=tiny.engine,
        model=tiny.model,
        task=tiny.task,
        warmup=tiny.warmup,
    )


def job(**engine: Any) -> tuple[TrainerFactory, Any, LLM]:
    torch.manual_seed(0)
    settings = trl_settings()
    task = PalindromeTask(settings.task)
    tokenizer = build_tokenizer(task.constant_parts)
    policy = build_policy(settings.model, tokenizer)
    config: InferenceConfig = settings.engine.replace(**engine)
    data = TrainerFactory(settings, task, tokenizer, ProblemStream(task, 0))
    return data, policy, LLM(policy, inference_config=config)


def test_without_trl_the_job_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "trl", None)
    with pytest.raises(ConfigError, match=r"pip install 'rollout-engine\[trl,demo\]'"):
        run_job(trl_settings())


def test_trl_trains_on_our_tokens_with_log_probs_equal_to_its_own(tmp_path: Path) -> None:
    data, policy, llm = job()
    before = {name: tensor.clone() for name, tensor in policy.named_parameters()}
    trainer = data.trainer(policy, 3, tmp_path, TRLRollouts(llm))
    trainer.train()
    rows = [row for row in trainer.state.log_history if "reward" in row]
    assert len(rows) == 3
    assert 0 < reward_summary(rows)["max_logprob_difference"] < 1e-4
    assert all(0.999 < row["sampling/importance_sampling_ratio/min"] <= 1.0 for row in rows)
    assert any(not torch.equal(before[name], p) for name, p in policy.named_parameters())
    # Each step's weights were pushed before its rollouts, under a version of their own.
    assert llm.weights_version == 3
    assert llm.state is EngineState.SUSPENDED
    stats = llm.stats()
    assert stats.num_finished == 3 * 4 * 4
    assert stats.num_forked_requests == 3 * 4 * 3, "equal neighbours share their prompt"


def test_a_prompt_that_does_not_fit_is_named_with_the_remedy(tmp_path: Path) -> None:
    data, policy, llm = job(max_sequence_length=8)
    trainer = data.trainer(policy, 1, tmp_path, TRLRollouts(llm))
    with pytest.raises(RolloutError, match="max_sequence_length"):
        trainer.train()


def test_trl_gets_the_true_probabilities_of_truncated_draws_as_it_wants_of_its_own_engine(
    tmp_path: Path,
) -> None:
    data, policy, llm = job()
    trainer = data.trainer(policy, 1, tmp_path, TRLRollouts(llm))
    trainer.top_p = 0.9
    assert sampling_params_of(trainer).logprobs_mode == "processed"
