"""The job on your own checkpoint, file of questions and reward function, by overrides."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

from benchmarks.virtual_time import run_virtually
from examples.arithmetic import SYSTEM_PROMPT, all_sums, write_checkpoint, write_questions
from rollout import ConfigError, SamplingParams
from tests.serve import test_text_protocols as text_protocols
from tests.trainer_hooks.producer.fake_llm import FakeLLM
from trainer_hooks import RolloutBatch
from trainer_hooks.metrics import read_jsonl
from trainer_hooks.train.job import JobSettings, compose_settings
from trainer_hooks.train.learner import Learner
from trainer_hooks.train.main import run_seed
from trainer_hooks.train.settings import RewardSettings, RewardTerm
from trainer_hooks.train.task import Task, reward_runner

REWARD = "reward=examples.arithmetic:is_right"
REWARD_MODEL = "trainer_hooks.rewards:RewardModel"
SMALL = [
    "algorithm.groups_per_step=2", "algorithm.group_size=2", "algorithm.num_minibatches=1",
    "algorithm.max_new_tokens=4", "engine.max_requests=8", "trainer.num_threads=1", "logger=quiet",
]  # fmt: skip


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a model in model/ and prompts in questions.jsonl."""
    directory = tmp_path_factory.mktemp("own")
    write_checkpoint(directory / "model", hidden_size=16, num_layers=1)
    write_questions(directory / "questions.jsonl", all_sums(range(10, 16)))
    return directory


def settings_of(*arguments: str) -> JobSettings:
    return compose_settings(arguments)


def own_settings(own: Path, *arguments: str) -> JobSettings:
    where = [f"model.path={own / 'model'}", "data=jsonl", f"data.path={own / 'questions.jsonl'}"]
    return settings_of(*where, *arguments)


def task_of(settings: JobSettings) -> Task:
    return Task(settings.model, settings.data, settings.reward, settings.warmup.source)


def test_rollout_train_runs_on_own_model_data_and_reward_by_overrides(
    own: Path, tmp_path: Path
) -> None:
    settings = own_settings(
        own, REWARD, *SMALL, "trainer.num_steps=2", "trainer.eval_interval=1",
        "data.num_held_out=2", "warmup=supervised", "warmup.target_reward=-2", "warmup.max_steps=1",
        "reward.terms.length.path=trainer_hooks.rewards:LengthReward",
        "reward.terms.length.options={max_tokens: 4, buffer_tokens: 2}",
    )  # fmt: skip
    summary = run_seed(tmp_path / "own", settings, seed=0)
    rows = read_jsonl(tmp_path / "own" / "metrics.jsonl")
    steps = [row for row in rows if "reward" in row]
    assert summary["num_steps"] == len(steps) == 2
    total = steps[0]["rewards/is_right/mean"] + steps[0]["rewards/length/mean"]
    assert steps[0]["reward"] == pytest.approx(total)
    assert {"rewards/is_right/std", "rewards/length/std"} <= set(steps[0])
    assert [r["trainer/step"] for r in rows if "eval/greedy_reward" in r] == [0, 1, 2]
    saved = AutoTokenizer.from_pretrained(tmp_path / "own" / "checkpoints" / "step_000002")
    assert saved.chat_template, "the checkpoint can be chatted with"


def reward(completion_ids: Sequence[Sequence[int]]) -> list[float]:
    return [float(ids[0]) for ids in completion_ids]


def test_evaluate_keeps_sampled_metrics_apart_from_a_term_named_reward(own: Path) -> None:
    arguments = [f"reward={__name__}:reward", "data.num_held_out=3", "trainer.evaluation.n=2"]
    settings = own_settings(own, *arguments)
    params = SamplingParams(num_tokens_to_generate=3)
    evaluation = task_of(settings).evaluate(FakeLLM(), params, settings.trainer.evaluation)
    metrics = run_virtually(evaluation)
    assert metrics["eval/reward"] == metrics["eval/rewards/reward"]
    assert metrics["eval/reward"] != metrics["eval/greedy_reward"]
    assert [name for name in metrics if name.endswith("greedy_reward")] == ["eval/greedy_reward"]


@pytest.mark.parametrize("has_chat", [False, True])
def test_job_trains_on_the_prompt_ids_of_the_transformers_tokenizer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_chat: bool
) -> None:
    """The tokenizer adds a BOS token to raw text, and the chat template writes its own."""
    tokenizer = AutoTokenizer.from_pretrained(text_protocols.directory())
    rows = [{"prompt": f"The quick brown fox {i}", "answer": str(i)} for i in range(4)]
    (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    trained: list[list[int]] = []
    update = Learner.update

    def recorded(self: Learner, batch: RolloutBatch, *given: Any) -> Any:
        trained.extend(batch.tokens_BT.tolist())
        return update(self, batch, *given)

    monkeypatch.setattr(Learner, "update", recorded)
    settings = settings_of(
        f"model.path={text_protocols.directory()}", "engine.max_sequence_length=64",
        "data=jsonl", f"data.path={tmp_path / 'rows.jsonl'}",
        f"data.chat={str(has_chat).lower()}", "data.num_held_out=0", REWARD, *SMALL,
        "trainer.num_steps=1", "trainer.eval_interval=0",
    )  # fmt: skip
    run_seed(tmp_path / "run", settings, seed=0)
    expected = []
    for row in rows:
        chat = [{"role": "user", "content": row["prompt"]}]
        expected.append(
            tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
            if has_chat
            else tokenizer(row["prompt"]).input_ids
        )
    assert trained
    for tokens in trained:
        assert any(tokens[: len(ids)] == ids for ids in expected)
        assert tokens[0] == tokenizer.bos_token_id


def test_reward_terms_of_several_conventions_are_summed_by_weight(own: Path) -> None:
    settings = own_settings(
        own, REWARD, "reward.terms.is_right.weight=2",
        "reward.terms.verl.path=tests.trainer_hooks.reward_functions:compute_score",
        "reward.terms.verl.convention=verl",
    )  # fmt: skip
    columns = {"answer": ["12", "7"], "ground_truth": ["12", "7"]}
    rewards = task_of(settings).reward.score(["?"] * 2, ["12", "3"], [[1], [1]], columns)
    assert asyncio.run(rewards) == [3.0, 1.0]


def test_data_chat_applies_the_chat_template_to_text_unless_false(own: Path) -> None:
    task = task_of(own_settings(own, REWARD, f"data.system_prompt='{SYSTEM_PROMPT}'"))
    prompt = str(task.prompts(0)[0].prompt)
    assert prompt.startswith(f"<|system|>{SYSTEM_PROMPT}<|end|><|user|>What is")
    assert prompt.endswith("?<|end|><|assistant|>")
    plain = task_of(own_settings(own, REWARD, "data.chat=false"))
    assert str(plain.prompts(0)[0].prompt).startswith("What is")
    with pytest.raises(ConfigError, match=r"data\.chat=false turns it off"):
        task_of(own_settings(own, REWARD, "data.chat=false", "data.system_prompt=x"))


def test_num_held_out_rows_are_left_out_of_training(own: Path) -> None:
    task = task_of(own_settings(own, REWARD, "data.num_held_out=3"))
    train = [task.prompts(0)[i].prompt for i in range(len(task.prompts(0)))]
    held_out = [item.prompt for item in task.held_out]
    assert (len(train), len(held_out)) == (33, 3)
    assert len({*train, *held_out}) == 36
    assert sorted(train) == sorted(
        task.warmup_prompts(0)[i].prompt for i in range(len(task.warmup_prompts(0)))
    )


def test_data_sources_and_warmup_source_are_read(own: Path) -> None:
    path = own / "questions.jsonl"
    settings = settings_of(
        f"model.path={own / 'model'}", "data=mixture", REWARD,
        "data.sources.sums.kind=jsonl", f"data.sources.sums.path={path}",
        "data.sources.chains.kind=reasoning_gym", "data.sources.chains.path=chain_sum",
        "data.sources.chains.options.size=32", "data.sources.chains.weight=2",
        "warmup=supervised", "warmup.source.kind=jsonl", f"warmup.source.path={path}",
    )  # fmt: skip
    task = task_of(settings)
    names = [task.prompts(0)[i].columns["data_source"] for i in range(20)]
    assert 12 <= names.count("chains") <= 14
    warmup = [task.warmup_prompts(0)[i].prompt for i in range(len(task.warmup_prompts(0)))]
    held_out = {item.prompt for item in task.held_out}
    assert len(warmup) == 34, "2 of the 36 sums are held out"
    assert held_out.isdisjoint(warmup)


def test_no_prompt_of_data_sources_is_both_held_out_and_trained_on(
    own: Path, tmp_path: Path
) -> None:
    few = tmp_path / "few.jsonl"
    write_questions(few, all_sums(range(20, 24)))
    settings = settings_of(
        f"model.path={own / 'model'}", "data=mixture", REWARD,
        "data.sources.many.kind=jsonl", f"data.sources.many.path={own / 'questions.jsonl'}",
        "data.sources.few.kind=jsonl", f"data.sources.few.path={few}",
        "data.sources.few.weight=2",
    )  # fmt: skip
    task = task_of(settings)
    held_out = {item.prompt for item in task.held_out}
    rows = task.prompts(0)
    assert len(held_out) >= 3
    assert held_out.isdisjoint(rows[i].prompt for i in range(len(rows)))


BAD_ROWS = [
    ({"prompt": "What is \ud83d + 1?"}, "half a surrogate pair"),
    ({"prompt": [{"role": "system", "content": "x"}]}, "the chat template refuses.*No system"),
    ({"prompt": [{"role": "user", "content": [{"type": "image"}]}]}, "text only"),
    ({"prompt": "1" * 1024}, r"leaves no room to answer in engine\.max_sequence_length=1024"),
    ({"prompt": ""}, "is ''"),
    ({"question": "1 + 1"}, "no column 'prompt'"),
    ({"prompt": [10**6]}, "token ids must be in"),
    ({"prompt": "1 + 1", "answer": None}, "'answer', which is None; it must be a text or"),
]


@pytest.mark.parametrize(("row", "message"), BAD_ROWS)
def test_on_bad_row_refuses_bad_rows_or_skips_and_counts_them(
    own: Path,
    tmp_path: Path,
    row: dict[str, Any],
    message: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    model, path = tmp_path / "model", tmp_path / "questions.jsonl"
    shutil.copytree(own / "model", model)
    template = model / "chat_template.jinja"
    refusal = "{% if messages[0].role == 'system' %}{{ raise_exception('No system') }}{% endif %}"
    template.write_text(refusal + template.read_text())
    good = [{"prompt": "1 + 1", "answer": "2"}, {"prompt": "1 + 2", "answer": "3"}]
    rows = (good[0], {"answer": "0", **row}, good[1])
    path.write_text("".join(json.dumps(each) + "\n" for each in rows))

    def prompts_of(*overrides: str) -> Any:
        where = [f"model.path={model}", "data=jsonl", f"data.path={path}", REWARD]
        settings = settings_of(*where, "warmup=supervised", "warmup.target_reward=0", *overrides)
        length, column = settings.engine.max_sequence_length, settings.warmup.answer_column
        task = Task(
            settings.model, settings.data, settings.reward,
            max_sequence_length=length, answer_column=column,
        )  # fmt: skip
        return task.prompts(0)

    with pytest.raises(ConfigError, match=rf"questions\.jsonl, line 2.*{message}"):
        prompts_of()
    prompts = prompts_of("data.on_bad_row=skip")
    assert [prompts[i].columns["answer"] for i in range(len(prompts))] == ["2", "3"]
    assert "data: 1 of 3 rows are bad and skipped" in caplog.text


def list_with_a_bad_row(part: str, seed: int) -> list[dict[str, str]]:
    return [{"prompt": prompt} for prompt in (f"{part} 1", "", f"{part} 2")]


def test_on_bad_row_skip_skips_a_bad_row_of_a_list_that_a_function_returns(own: Path) -> None:
    where = [f"model.path={own / 'model'}", f"data.path={__name__}:list_with_a_bad_row", REWARD]
    prompts = task_of(settings_of("data=python", *where, "data.on_bad_row=skip")).prompts(0)
    assert ["train 1" in prompts[0].prompt, "train 2" in prompts[1].prompt] == [True, True]
    assert len(prompts) == 2
    with pytest.raises(ConfigError, match=r"row 1 of .* is ''"):
        task_of(settings_of("data=python", *where))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["reward=nowhere:score"], r"reward\.terms\.score\.path=nowhere:score: there is no module"),
        (
            ["reward=examples.arithmetic:is_rigt"],
            "has no is_rigt; did you mean examples.arithmetic:is_right?",
        ),
        (
            ["reward=examples/arithmetic.py:is_right"],
            "give the module, such as examples.arithmetic:is_right",
        ),
        ([REWARD, "reward.terms.is_right.options.wrong=1"], r"options=\{'wrong': 1\}"),
        ([REWARD, "data.prompt_column=question"], r"no column 'question'; it has prompt, answer"),
        ([REWARD, "data.path=none.jsonl"], r"none\.jsonl cannot be read"),
        ([REWARD, "model.path=tests"], "model.path=tests: AutoTokenizer cannot load it"),
        ([REWARD, "model.path=/nowhere"], "model.path=/nowhere is neither a directory nor"),
        (
            [
                "reward=trainer_hooks.rewards:RewardModel",
                "reward.terms.RewardModel.options.path=/no",
            ],
            "path of the reward model=/no is neither a directory",
        ),
    ],
)
def test_missing_files_and_objects_of_settings_are_named(
    own: Path, changes: list[str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        task_of(own_settings(own, *changes)).prompts(0)[0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["data=jsonl", "data.path=a", REWARD], r"model\.path is missing"),
        (["data=jsonl", "model.path=a", REWARD], r"data needs kind and path; data\.path is None"),
        (["data=jsonl", "model.path=a", "data.path=a"], "no reward is given"),
        (
            ["data=jsonl", "model.path=a", "data.path=a", REWARD, "model.initializer_range=0.1"],
            "with a shape for random weights",
        ),
        (["data=mixture", "model.path=a", REWARD, "data.sources.x.kind=jsonl"], "sources.x needs"),
    ],
)
def test_job_without_a_required_setting_names_it(arguments: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        settings_of(*arguments)


def test_rollout_train_without_data_names_the_options() -> None:
    with pytest.raises(ConfigError, match=r"data is missing; give data=OPTION.*jsonl.*parquet"):
        settings_of("model.path=a")


def test_reward_model_scores_batches_as_single_samples(own: Path, tmp_path: Path) -> None:
    config = AutoConfig.from_pretrained(own / "model", num_labels=1)
    torch.manual_seed(0)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(tmp_path / "rm")
    AutoTokenizer.from_pretrained(own / "model").save_pretrained(tmp_path / "rm")
    term = RewardTerm(
        path=REWARD_MODEL,
        options={"path": str(tmp_path / "rm"), "batch_size": 4},
    )
    runner = reward_runner(RewardSettings(terms={"rm": term}))
    prompts, texts = ["What is 3 + 4?"] * 3, ["7", "something much longer", "-12"]

    async def scores() -> tuple[list[float], list[float]]:
        ids = [[1]] * 3
        together = await runner.score(prompts, texts, ids, {})
        one_by_one = [(await runner.score(prompts[:1], [text], [[1]], {}))[0] for text in texts]
        return together, one_by_one

    together, one_by_one = asyncio.run(scores())
    assert together == pytest.approx(one_by_one, abs=1e-5)
    assert len(set(together)) == 3
