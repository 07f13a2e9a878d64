"""TRL's GRPOTrainer over the real engine, cut down to seconds."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from tokenizers.processors import TemplateProcessing

from examples.train_trl import make_trainer, reward_summary, run_job
from rollout import LLM, ConfigError, EngineState, InferenceConfig, RolloutError
from rollout.text import HFTokenizer, encode_prompt
from tests.installed import needs
from tests.trainer_hooks.train.grpo_settings import tiny_settings
from trainer_hooks.train.job import JobSettings
from trainer_hooks.train.palindromes import letter_tokenizer
from trainer_hooks.train.settings import DataSettings
from trainer_hooks.train.task import Task
from trainer_hooks.trl_rollouts import TRLRollouts, sampling_params_of

pytestmark = needs("reasoning_gym", "trl")


def trl_settings(**changes: Any) -> JobSettings:
    return tiny_settings(algorithm__group_size=4, algorithm__max_new_tokens=6, **changes)


def trainer_of(
    directory: Path, num_steps: int, settings: JobSettings | None = None, **engine: Any
) -> tuple[Any, torch.nn.Module, LLM]:
    """A GRPOTrainer of a few small steps, its policy and the engine that it generates with."""
    torch.manual_seed(0)
    settings = settings or trl_settings()
    task = Task(settings.model, settings.data, settings.reward)
    policy = task.new_policy()
    config: InferenceConfig = settings.engine.replace(**engine)
    llm = LLM(policy, inference_config=config)
    rollouts = TRLRollouts(llm)
    return make_trainer(settings, task, policy, num_steps, rollouts, directory), policy, llm


def chat_tokenizer() -> Any:
    """The demo's tokenizer, but it adds BOS to texts, as its chat template does."""
    tokenizer = letter_tokenizer()
    tokenizer.add_special_tokens({"bos_token": "<begin>"})
    begin = [("<begin>", tokenizer.bos_token_id)]
    added = TemplateProcessing(single="<begin> $A", special_tokens=begin)
    tokenizer.backend_tokenizer.post_processor = added
    tokenizer.chat_template = (
        "{{ bos_token }}{% for message in messages %}{{ message.content }}{% endfor %}{{ after }}"
    )
    return tokenizer


def test_without_trl_the_job_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "trl", None)
    with pytest.raises(ConfigError, match=r"pip install 'trl>=1.16' reasoning-gym"):
        run_job(trl_settings(), 3)


def test_trl_trains_on_our_tokens_with_log_probs_equal_to_its_own(tmp_path: Path) -> None:
    trainer, policy, llm = trainer_of(tmp_path, 3)
    before = {name: tensor.clone() for name, tensor in policy.named_parameters()}
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
    trainer, _, _ = trainer_of(tmp_path, 1, max_sequence_length=8)
    with pytest.raises(RolloutError, match="max_sequence_length"):
        trainer.train()


def test_trl_gets_the_true_probabilities_of_truncated_draws_as_it_wants_of_its_own_engine(
    tmp_path: Path,
) -> None:
    trainer, _, _ = trainer_of(tmp_path, 1)
    trainer.top_p = 0.9
    assert sampling_params_of(trainer).logprobs_mode == "processed"


def test_the_job_leaves_a_summary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    summary = run_job(trl_settings(), num_steps=2)
    assert {"reward_gain", "max_logprob_difference"} <= set(summary)
    assert (tmp_path / "outputs" / "train_trl" / "summary.json").exists()


@pytest.mark.parametrize("system_prompt", [None, "abba\n"])
def test_make_trainer_gives_prompts_of_a_chat_template_the_tokens_of_rollout_train(
    tmp_path: Path, system_prompt: str | None
) -> None:
    data = DataSettings(
        kind="reasoning_gym",
        path="palindrome_generation",
        options={"size": 16, "seed": 0},
        system_prompt=system_prompt,
        template_options={"after": "\n\n"},
    )
    tokenizer = f"{__name__}:{chat_tokenizer.__name__}"
    settings = replace(trl_settings(model__tokenizer=tokenizer), data=data)
    trainer, _, _ = trainer_of(tmp_path, 1, settings)
    task = Task(settings.model, settings.data, settings.reward)
    encodes, prompts = HFTokenizer(task.tokenizer), task.prompts(settings.seed)
    expected = {tuple(encode_prompt(encodes, prompts[i].prompt)) for i in range(len(prompts))}
    assert {ids.count(task.tokenizer.bos_token_id) for ids in expected} == {1}
    sampled: list[tuple[int, ...]] = []
    submit = trainer.rollout_func

    def recorded(rows: Any, of: Any) -> Any:
        output = submit(rows, of)
        sampled.extend(map(tuple, output["prompt_ids"]))
        return output

    trainer.rollout_func = recorded
    trainer.train()
    assert sampled
    assert set(sampled) <= expected
