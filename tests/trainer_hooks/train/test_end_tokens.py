"""A checkpoint with several end tokens, as Gemma's: rollouts of jobs and of TRL's trainer stop at
each.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

from transformers import AutoModelForCausalLM, AutoTokenizer

from examples.arithmetic import all_sums, write_checkpoint, write_questions
from rollout import LLM, ConfigError, InferenceConfig
from tests.trainer_hooks.train.test_own_data import REWARD, SMALL, own_settings, task_of

# Gemma's tokenizer names 1 (<eos>); its generation_config.json adds 106 (<end_of_turn>), which ends
# an answer.
END_IDS = [1, 106]
ENGINE = InferenceConfig(dtype="float32", buffer_size_gb=0.05, num_threads=1)


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("gemma_like")
    write_checkpoint(directory / "model", hidden_size=16, num_layers=1)
    (directory / "model" / "generation_config.json").write_text(
        json.dumps({"eos_token_id": END_IDS})
    )
    write_questions(directory / "questions.jsonl", all_sums(range(10, 13)))
    return directory


@pytest.mark.parametrize("end_id", END_IDS)
def test_job_rollouts_stop_at_every_end_token_of_the_checkpoint(own: Path, end_id: int) -> None:
    settings = own_settings(own, REWARD, *SMALL)
    task = task_of(settings)
    # All that can be drawn is this end token.
    params = replace(settings.algorithm.sampling_params(), allowed_token_ids=[end_id])
    with LLM(task.new_policy(), task.tokenizer, ENGINE) as llm:
        (request,) = llm.generate([str(task.prompts(0)[0].prompt)], params)
    assert (request.generated_tokens, request.finish_reason) == ([end_id], "stop")


@pytest.mark.parametrize("end_id", END_IDS)
def test_trl_rollouts_stop_at_every_end_token_of_the_checkpoint(
    own: Path, tmp_path: Path, end_id: int
) -> None:
    trainer, llm = trl_trainer(own, tmp_path)
    with llm:
        # A bias of 100 leaves every other token a probability of 0.
        trainer.args.generation_kwargs = {"logit_bias": {end_id: 100.0}}
        output = trainer.rollout_func(["What is 10 + 11?"], trainer)
    assert output["completion_ids"] == [[end_id]]
    assert end_id in trainer.eos_token_ids, "the trainer takes the completion for complete"


def test_trl_rollouts_see_the_prompt_tokens_of_the_trainer_with_its_chat_template_kwargs(
    own: Path, tmp_path: Path
) -> None:
    trainer, llm = trl_trainer(own, tmp_path, chat_template_kwargs={"enable_thinking": False})
    trainer.processing_class.chat_template = (
        "{% for m in messages %}<|user|>{{ m.content }}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
        "{% if enable_thinking is defined and not enable_thinking %}no thoughts: {% endif %}"
    )
    question = [{"role": "user", "content": "What is 10 + 11?"}]
    trainer.args.generation_kwargs = {"max_new_tokens": 1}
    with llm:
        for prompts in (["What is 10 + 11?", "12"], [question, [*question, *question]]):
            expected = trainer._tokenize_prompts(prompts)[0]
            assert trainer.rollout_func(prompts, trainer)["prompt_ids"] == expected
        assert "no thoughts" in trainer.processing_class.decode(expected[0])
        picture = [{"role": "user", "content": [{"type": "image", "image": "picture.png"}]}]
        with pytest.raises(ConfigError, match=r"images.*picture\.png"):
            trainer.rollout_func([picture], trainer)


def trl_trainer(own: Path, directory: Path, **settings: Any) -> tuple[Any, LLM]:
    pytest.importorskip("trl")
    from datasets import Dataset
    from trl.trainer.grpo_config import GRPOConfig
    from trl.trainer.grpo_trainer import GRPOTrainer

    from trainer_hooks.trl_rollouts import TRLRollouts

    model = AutoModelForCausalLM.from_pretrained(own / "model")
    llm = LLM(model, inference_config=ENGINE)
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=GRPOConfig(
            output_dir=str(directory),
            per_device_train_batch_size=2,
            num_generations=2,
            max_completion_length=8,
            use_cpu=True,
            bf16=False,
            **settings,
        ),
        train_dataset=Dataset.from_list([{"prompt": "What is 10 + 11?"}]),
        processing_class=AutoTokenizer.from_pretrained(own / "model"),
        rollout_func=TRLRollouts(llm),
    )
    return trainer, llm
