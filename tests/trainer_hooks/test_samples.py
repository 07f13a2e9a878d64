"""SampleLog and the text of samples: which are shown, and what is written."""

import io
import math
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console

from tests.trainer_hooks.fakes import finished_request
from trainer_hooks import (
    MetricsLogger,
    PromptItem,
    Rollout,
    ScoredGroup,
    TrainingBatch,
    collate_rollouts,
)
from trainer_hooks.metrics import JsonlWriter, read_jsonl
from trainer_hooks.prompts.ledger import PromptTicket
from trainer_hooks.rewards import WeightedReward
from trainer_hooks.train import Dashboard
from trainer_hooks.train.samples import SampleLog, chosen_rows, sample_of, texts_of, visible
from trainer_hooks.train.settings import LoggerSettings


class Letters:
    """A tokenizer in which token 1 is "a", 2 is "b", and so on."""

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        return "".join("?abcdefghijk"[i] for i in ids)


def batch_of(rewards: list[float], train_version: int = 2) -> TrainingBatch:
    """Return groups of two rollouts that answer "ab" with "cd", sampled by versions 1 and 2."""
    requests = [
        finished_request([1, 2], [3, 4], versions=[1, 2], logprobs=[-1.0, -1.0]) for _ in rewards
    ]
    groups = [
        ScoredGroup(
            ticket=PromptTicket(0, i, 7 + i),
            item=PromptItem("ab", {"data_source": "letters"}),
            rollouts=[Rollout([request]) for request in requests[2 * i : 2 * i + 2]],
            rewards=rewards[2 * i : 2 * i + 2],
            generate_s=0.0,
            reward_s=0.0,
        )
        for i in range(len(rewards) // 2)
    ]
    return TrainingBatch(
        index=0,
        groups=groups,
        rollouts=collate_rollouts(requests, rewards, train_version),
        group_size=2,
        version=train_version,
        admitted_at_version=train_version,
        metrics={},
    )


def test_sample_of_has_texts_rewards_advantage_and_a_span_per_version() -> None:
    reward = WeightedReward(1.5, {"right": 1.0, "short": 0.5})
    sample = sample_of(4, batch_of([reward, 0.0]), 0, torch.tensor([0.75, -0.75]), Letters())
    assert sample["spans"] == [[1, "c"], [2, "d"]]
    assert (sample["prompt"], sample["completion"], sample["num_tokens"]) == ("ab", "cd", 2)
    assert (sample["reward"], sample["rewards"]) == (1.5, {"right": 1.0, "short": 0.5})
    assert (sample["advantage"], sample["mean_lag"], sample["max_lag"]) == (0.75, 0.5, 1)
    assert (sample["prompt_index"], sample["data_source"]) == (7, "letters")


def test_chosen_rows_are_the_best_the_worst_and_one_between() -> None:
    nan = math.nan
    rewards = [0.0, 1.0, 2.0] * 2 + [nan] * 3 + [0.0, nan, 1.0] + [1.0, 3.0, 2.0] * 2
    assert chosen_rows(torch.tensor(rewards), 3, 3) == [2, 14]
    assert chosen_rows(torch.tensor([0.0, 1.0, 2.0] * 3), 3, 3) == [2, 3, 7]
    assert chosen_rows(torch.tensor([0.0, 1.0]), 2, 0) == []


class Run:
    """Records the calls of a wandb run."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    def log(self, row: dict[str, Any]) -> None:
        self.rows.append(row)

    def finish(self, exit_code: int | None = None) -> None: ...


def test_sample_log_writes_each_step_and_shows_at_its_interval(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(Table=lambda **table: table))
    output, run = io.StringIO(), Run()
    view = Dashboard(Console(file=output, width=200))
    settings = LoggerSettings(num_samples=1, sample_interval=2, num_completions=3)
    with (
        MetricsLogger(console=view, wandb=run) as logger,
        SampleLog(tmp_path, Letters(), settings, view, logger) as samples,
    ):
        for step in (1, 2, 3):
            samples.log(step, batch_of([1.0, 0.0, 0.5, 0.25]), torch.ones(4))
    rows = read_jsonl(tmp_path / "completions.jsonl")
    assert [row["trainer/step"] for row in rows] == [1, 1, 1, 2, 2, 2, 3, 3, 3]
    lines = output.getvalue().splitlines()
    figures = "step 1  reward 1.000  advantage +1.000  versions 1-2  lag 0.50  2 tokens, None"
    assert lines[0] == figures
    assert [line.strip() for line in lines[1:3]] == ["ab", "> cd"]
    assert sum(line.startswith("step") for line in lines) == 2
    table = run.rows[-1]["completions"]
    cells = dict(zip(table["columns"], table["data"][0], strict=True))
    assert (cells["completion"], cells["versions"], cells["reward"]) == ("cd", "1-2", 1.0)


def test_completions_file_is_rotated_and_cut_on_resume(tmp_path: Path) -> None:
    path = tmp_path / "c.jsonl"
    writer = JsonlWriter(path, max_bytes=50)
    for step in range(1, 6):
        writer.log({"trainer/step": step, "text": "x"})
    writer.close()
    assert [row["trainer/step"] for row in read_jsonl(tmp_path / "c.1.jsonl")] == [3, 4]
    assert [row["trainer/step"] for row in read_jsonl(path)] == [5]
    JsonlWriter(path, resume_step=3).close()
    assert [row["trainer/step"] for row in read_jsonl(tmp_path / "c.1.jsonl")] == [3]
    assert read_jsonl(path) == []


def test_texts_of_keeps_a_split_character_whole_in_the_later_text() -> None:
    class Bytes:
        def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
            return bytes(ids).decode(errors="replace")

    tokens = list("a é🎉".encode())
    assert texts_of(tokens, [1, 2, 3, 2], Bytes()) == ["a", " ", "é", "🎉"]
    assert texts_of(tokens[:-1], [3, 4], Bytes()) == ["a ", "é\ufffd"], "it was cut"
    assert texts_of(tokens[:1], [1], Bytes()) == ["a"], "nothing was generated"


def test_visible_replaces_control_characters() -> None:
    assert visible("a\tb\n\x1b[2J\x00\x7f\x9b\ud800") == "a\tb\n␛[2J␀␡\ufffd\ufffd"
