"""The real wandb package, offline: what is read back from its file is what the JSONL holds."""

import json
import math
from pathlib import Path

import pytest
import torch
from rich.console import Console

from tests.installed import needs
from tests.trainer_hooks.fakes import finished_request
from tests.trainer_hooks.test_samples import Letters, batch_of
from tests.trainer_hooks.wandb_files import read_history
from trainer_hooks import MetricsLogger, collate_rollouts
from trainer_hooks.metrics import read_jsonl, rollout_metrics, start_wandb_run, step_metrics
from trainer_hooks.metrics.time_account import TimeAccount
from trainer_hooks.metrics.wandb_run import where_to_look
from trainer_hooks.train import Dashboard
from trainer_hooks.train.samples import SampleLog
from trainer_hooks.train.settings import LoggerSettings

pytestmark = needs("wandb")


def test_an_offline_run_is_written_below_the_given_directory(tmp_path: Path) -> None:
    run = start_wandb_run(
        project="test",
        name="o" * 200,
        group="sweep",
        directory=tmp_path / "run",
        config={"seed": 0},
    )
    assert (run.name, run.group) == ("o" * 128, "sweep")
    with MetricsLogger(jsonl=tmp_path / "m.jsonl", wandb=run) as logger:
        logger.log({"reward": 0.5}, step=1, version=2)
    assert list((tmp_path / "run").glob("wandb/offline-run-*/*.wandb"))


def test_an_offline_run_read_back_holds_every_metric_of_the_jsonl(tmp_path: Path) -> None:
    run = start_wandb_run(project="test", name="offline", directory=tmp_path / "run", config={})
    account = TimeAccount()
    with MetricsLogger(jsonl=tmp_path / "m.jsonl", wandb=run) as logger:
        for step in (1, 2):
            requests = [
                finished_request([1], [2, 3, 4], versions=[0, 0, step]),
                finished_request([1], [2], versions=[step]),
            ]
            batch = collate_rollouts(requests, [1.0, 0.0], train_version=step)
            logger.log(
                {
                    **rollout_metrics(batch, 2, finish_reasons=["length", "stop"], entropy=1.5),
                    **step_metrics(account.take(), num_generated_tokens=4, num_trained_tokens=4),
                    "train/loss": math.nan,
                },
                step=step,
                version=step,
            )
            logger.log({"engine/num_running": step})
    written = read_jsonl(tmp_path / "m.jsonl")
    read_back = read_history(tmp_path / "run")
    assert len(written) == len(read_back) == 4
    for row, drawn in zip(written, read_back, strict=True):
        assert {name: drawn[name] for name in row} == row
    parts = {part: read_back[2][f"policy_staleness/hist/{part}"] for part in ("values", "bins")}
    assert parts == {"values": [2, 0, 2], "bins": [-0.5, 0.5, 1.5, 2.5]}


def test_samples_of_an_offline_run_are_read_back_from_its_tables_and_tags_are_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = start_wandb_run(
        project="test", name="table", directory=tmp_path / "run", config={}, tags=["sums"]
    )
    assert run.tags == ("sums",)
    assert where_to_look(run).startswith("W&B, offline: wandb sync ")
    assert "WARNING" not in capsys.readouterr().err
    settings = LoggerSettings(num_samples=2, sample_interval=2, num_completions=4)
    with (
        MetricsLogger(wandb=run) as logger,
        SampleLog(tmp_path, Letters(), settings, Dashboard(Console(quiet=True)), logger) as samples,
    ):
        for step in (1, 2, 3, 4):
            logger.log({"reward": 0.5}, step=step, version=step)
            samples.log(step, batch_of([1.0, 0.0, 0.5, 0.25]), torch.ones(4))
    drawn = [row for row in read_history(tmp_path / "run") if "completions/path" in row]
    assert [row["trainer/step"] for row in drawn] == [1, 2, 4]
    files = next((tmp_path / "run").glob("wandb/offline-run-*/files"))
    table = json.loads((files / drawn[-1]["completions/path"]).read_text())
    rows = [dict(zip(table["columns"], cells, strict=True)) for cells in table["data"]]
    assert [(row["completion"], row["reward"], row["versions"]) for row in rows] == [
        ("cd", 1.0, "1-2"),
        ("cd", 0.25, "1-2"),
    ]
    written = read_jsonl(tmp_path / "completions.jsonl")[-4:]
    for row, index in zip(rows, (0, 3), strict=True):
        shared = {name: row[name] for name in ("trainer/step", "prompt", "advantage", "mean_lag")}
        assert shared == {name: written[index][name] for name in shared}
