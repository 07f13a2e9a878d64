"""Samples of a run: which are shown, what is written, and the report that is made of them."""

import io
import math
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from rich.console import Console

from rollout.errors import ConfigError
from tests.trainer_hooks.fakes import finished_request
from trainer_hooks import (
    MetricsLogger,
    PromptItem,
    PromptTicket,
    Rollout,
    ScoredGroup,
    TrainingBatch,
    collate_rollouts,
)
from trainer_hooks.jobs import Dashboard, LoggerSettings, SampleLog, report
from trainer_hooks.jobs.report import write_report
from trainer_hooks.jobs.samples import chosen_rows, sample_of
from trainer_hooks.metrics import JsonlWriter, read_jsonl
from trainer_hooks.rewards import WeightedReward


class Letters:
    """Token 1 is "a", 2 is "b", and so on."""

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        return "".join("?abcdefghijk"[i] for i in ids)


def batch_of(rewards: list[float], train_version: int = 2) -> TrainingBatch:
    """Groups of two; each answers "ab" with "cd", sampled by versions 1 and 2."""
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


def test_a_sample_has_its_texts_rewards_advantage_and_a_span_for_each_version() -> None:
    reward = WeightedReward(1.5, {"right": 1.0, "short": 0.5})
    sample = sample_of(4, batch_of([reward, 0.0]), 0, torch.tensor([0.75, -0.75]), Letters())
    assert sample["spans"] == [[1, "c"], [2, "d"]]
    assert (sample["prompt"], sample["completion"], sample["num_tokens"]) == ("ab", "cd", 2)
    assert (sample["reward"], sample["rewards"]) == (1.5, {"right": 1.0, "short": 0.5})
    assert (sample["advantage"], sample["mean_lag"], sample["max_lag"]) == (0.75, 0.5, 1)
    assert (sample["prompt_index"], sample["data_source"]) == (7, "letters")


def test_shown_are_the_best_the_worst_and_one_between_of_groups_apart() -> None:
    nan = math.nan
    rewards = [0.0, 1.0, 2.0] * 2 + [nan] * 3 + [0.0, nan, 1.0] + [1.0, 3.0, 2.0] * 2
    assert chosen_rows(torch.tensor(rewards), 3, 3) == [2, 14]
    assert chosen_rows(torch.tensor([0.0, 1.0, 2.0] * 3), 3, 3) == [2, 3, 7]
    assert chosen_rows(torch.tensor([0.0, 1.0]), 2, 0) == []


class Run:
    """What a wandb run is asked for."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    def log(self, row: dict[str, Any]) -> None:
        self.rows.append(row)

    def finish(self, exit_code: int | None = None) -> None: ...


def test_samples_go_to_the_file_each_step_and_to_people_at_the_interval(
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
    assert lines[0] == "step 1  reward 1.000  advantage +1.000  versions 1-2  lag 0.50"
    assert [line.strip() for line in lines[1:3]] == ["ab", "> cd"]
    assert sum(line.startswith("step") for line in lines) == 2
    table = run.rows[-1]["completions"]
    cells = dict(zip(table["columns"], table["data"][0], strict=True))
    assert (cells["completion"], cells["versions"], cells["reward"]) == ("cd", "1-2", 1.0)


def test_a_file_that_gets_too_large_is_renamed_and_a_resume_cuts_both(tmp_path: Path) -> None:
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


def write_run(directory: Path) -> None:
    with MetricsLogger(jsonl=directory / "metrics.jsonl") as logger:
        logger.log({"eval/greedy_reward": 0.1}, step=0, version=0)
        for step in (1, 2):
            row = {"reward": step / 4, "rewards/a<b/mean": 0.5, "timing_share/train": 0.75}
            shares = {"timing_share/wait": 0.25, "timing_s/step": 2.0, "train/loss": math.nan}
            ages = {"policy_staleness/hist/0": 3, "policy_staleness/hist/1": 1}
            logger.log({**row, **shares, **ages}, step=step, version=step)
    file = JsonlWriter(directory / "completions.jsonl")
    batch = batch_of([1.0, math.nan], train_version=5)
    for row in (0, 1):
        file.log(sample_of(2, batch, row, torch.tensor([0.5, math.nan]), Letters()))
    file.close()


def test_a_report_has_curves_ages_times_and_samples_and_is_well_formed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path)
    monkeypatch.setattr("sys.argv", ["report", str(tmp_path), "--title", "GRPO & <own>"])
    report.main()
    assert capsys.readouterr().out.strip() == str(tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    assert "GRPO &amp; &lt;own&gt;" in page
    assert "rewards/a&lt;b/mean" in page
    charts = [part.partition("</svg>")[0] + "</svg>" for part in page.split("<svg")[1:]]
    for chart in charts:
        ElementTree.fromstring(f"<svg{chart}")
    assert len(charts) == 4, "reward with its evaluation, terms, ages, times; no loss was finite"
    assert "title='version 1' style='background:#ffc2c2'>c</span>" in page
    assert "reward 1.000" in page
    assert "failed" in page
    assert "http" not in page.replace("http://www.w3.org/2000/svg", ""), "nothing is fetched"


def test_a_report_of_a_directory_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no metrics"):
        write_report(tmp_path)
