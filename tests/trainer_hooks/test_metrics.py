"""MetricsLogger and its sinks: JSONL file, wandb run and view."""

import io
import json
import math
from pathlib import Path

import pytest
from rich.console import Console
from rich.text import Text

from rollout.errors import ConfigError
from rollout.telemetry import MetricsWriter
from tests.trainer_hooks.fakes import FakeWandbRun, finished_request
from trainer_hooks import MetricsLogger, collate_rollouts
from trainer_hooks.metrics import (
    JsonlWriter,
    ProgressView,
    read_jsonl,
    rollout_metrics,
)
from trainer_hooks.metrics.console import LONGEST_SILENCE_S
from trainer_hooks.metrics.wandb_run import declare_axes


def test_rollout_metrics_by_hand() -> None:
    requests = [
        finished_request([1], [2, 3, 4], versions=[0, 1, 2]),
        finished_request([1], [2], versions=[2]),
        finished_request([1], [2, 3], versions=[2, 2]),
        finished_request([1], [2, 3], versions=[0, 0]),
    ]
    batch = collate_rollouts(requests, [1.0, 0.0, 0.5, None], train_version=2)
    metrics = rollout_metrics(batch, group_size=2)
    assert metrics["reward"] == 0.5
    # Sample deviations within the groups: sqrt(0.5) and, of a single valid rollout, 0.
    assert metrics["reward_std"] == pytest.approx(math.sqrt(0.5) / 2)
    assert metrics["failed_fraction"] == 0.25
    assert metrics["completions/mean_length"] == 2.0
    assert metrics["completions/max_length"] == 3.0
    assert metrics["completions/num_tokens"] == 8
    # Trained tokens are aged 2, 1, 0; 0; 0, 0. Their KV is written a step later: 1, 0, 0; 0; 0, 0.
    assert metrics["policy_staleness/mean"] == 0.5
    assert metrics["policy_staleness/max"] == 2.0
    assert metrics["policy_staleness/stale_fraction"] == pytest.approx(2 / 6)
    assert metrics["kv_cache_staleness/mean"] == pytest.approx(1 / 6)
    assert metrics["kv_cache_staleness/max"] == 1.0


def test_rollout_metrics_refuse_rows_that_are_not_whole_groups() -> None:
    batch = collate_rollouts([finished_request([1], [2], versions=[0])], [1.0], train_version=0)
    with pytest.raises(ConfigError, match=r"1 rollouts.*group_size=2"):
        rollout_metrics(batch, group_size=2)


def test_shown_by_replaces_the_view_of_a_stage_and_keeps_the_files(tmp_path: Path) -> None:
    outputs = {name: io.StringIO() for name in ("run", "stage")}
    views = {
        name: ProgressView(Console(file=output, width=100), line_interval=1)
        for name, output in outputs.items()
    }
    with MetricsLogger(jsonl=tmp_path / "m.jsonl", console=views["run"]) as logger:
        with logger.shown_by(views["stage"]):
            views["stage"].start_stage("warm-up", 2)
            logger.log({"loss": 1.0}, step=1)
        views["run"].start_stage("GRPO", 2)
        logger.log({"loss": 2.0}, step=2)
    assert [row["loss"] for row in read_jsonl(tmp_path / "m.jsonl")] == [1.0, 2.0]
    assert outputs["stage"].getvalue().startswith("warm-up 1/2")
    assert outputs["run"].getvalue().startswith("GRPO 2/2")


def test_jsonl_writer_writes_null_for_numbers_that_are_not_finite(
    tmp_path: Path,
) -> None:
    writer = JsonlWriter(tmp_path / "m.jsonl")
    writer.log({"a": math.inf, "b": {"c": [math.nan, 1.0]}, "d": Path("x")})
    assert read_jsonl(tmp_path / "m.jsonl") == [{"a": None, "b": {"c": [None, 1.0]}, "d": "x"}]


def test_metrics_logger_sends_each_row_to_every_sink_with_its_axes(tmp_path: Path) -> None:
    run, output = FakeWandbRun(), io.StringIO()
    view = ProgressView(Console(file=output, width=100), line_interval=1, clock=lambda: 0.0)
    view.start_stage("GRPO", 2)
    with MetricsLogger(jsonl=tmp_path / "m.jsonl", wandb=run, console=view) as logger:
        logger.log({"reward": 0.25, "policy_staleness/mean": 0.5}, step=1, version=3)
    row = {"trainer/step": 1, "rollout/version": 3, "reward": 0.25, "policy_staleness/mean": 0.5}
    assert read_jsonl(tmp_path / "m.jsonl") == run.rows == [row]
    line = "GRPO 1/2  reward 0.250  staleness 0.50  elapsed 0:00, left 0:00"
    assert output.getvalue().strip() == line
    assert run.exit_code == 0


def test_metrics_logger_needs_at_least_one_sink() -> None:
    text = io.StringIO()
    with MetricsLogger(console=ProgressView(Console(file=text))) as logger:
        logger.log({"reward": 0.5}, step=10)
    assert "reward 0.500" in text.getvalue()
    with pytest.raises(ConfigError, match="jsonl, wandb or console"):
        MetricsLogger()


def test_metrics_logger_gives_the_engines_rows_the_latest_axes(tmp_path: Path) -> None:
    with MetricsLogger(jsonl=tmp_path / "m.jsonl") as logger:
        assert isinstance(logger, MetricsWriter)
        logger.log({"reward": 0.5}, step=4, version=6)
        logger.log({"engine/num_running": 2})
    assert read_jsonl(tmp_path / "m.jsonl")[1] == {
        "trainer/step": 4,
        "rollout/version": 6,
        "engine/num_running": 2,
    }


def test_metrics_logger_closes_its_sinks_and_marks_the_wandb_run_after_an_exception(
    tmp_path: Path,
) -> None:
    run = FakeWandbRun()
    with pytest.raises(RuntimeError), MetricsLogger(jsonl=tmp_path / "m.jsonl", wandb=run):
        raise RuntimeError
    assert run.exit_code == 1


def test_jsonl_writer_flushes_each_row_as_valid_json(tmp_path: Path) -> None:
    path = tmp_path / "run" / "m.jsonl"
    logger = MetricsLogger(jsonl=path)
    logger.log({"loss": math.nan, "reward": math.inf, "step": 2})
    assert json.loads(path.read_text(), parse_constant=pytest.fail) == {
        "loss": None,
        "reward": None,
        "step": 2,
    }
    logger.close()


def test_jsonl_writer_starts_a_new_file_or_keeps_rows_up_to_resume_step(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    with MetricsLogger(jsonl=path) as logger:
        logger.log({"warmup/step": 1})
        for step in (1, 2, 3):
            logger.log({"reward": step / 10}, step=step)
    with path.open("a") as file:
        file.write('{"trainer/step": 4, "rew')  # torn by a kill
    with MetricsLogger(jsonl=path, resume_step=2) as logger:
        logger.log({"reward": 0.9}, step=3)
    assert [row.get("reward") for row in read_jsonl(path)] == [None, 0.1, 0.2, 0.9]
    with MetricsLogger(jsonl=path):
        pass
    assert read_jsonl(path) == []


def test_declare_axes_draws_staleness_over_versions() -> None:
    run = FakeWandbRun()
    declare_axes(run)
    assert run.axes["trainer/step"] is run.axes["rollout/version"] is None
    assert run.axes["*"] == "trainer/step"
    assert run.axes["policy_staleness/*"] == "rollout/version"


def test_progress_view_shows_one_live_bar_with_the_latest_values() -> None:
    output = io.StringIO()
    view = ProgressView(Console(file=output, force_terminal=True, width=120))
    view.start_stage("GRPO", 2)
    view.show({"trainer/step": 1, "reward": 0.5})
    view.show({"completions/tokens_per_s": 1234.0})
    view.close()
    view.close()
    last = Text.from_ansi(output.getvalue()).plain.splitlines()[-1]
    assert "1/2" in last
    assert "reward 0.500  1,234 tokens/s" in last


def test_progress_view_without_a_terminal_prints_each_interval_and_the_end() -> None:
    output = io.StringIO()
    view = ProgressView(Console(file=output, width=100), line_interval=2)
    view.start_stage("GRPO", 3)
    for step in (1, 2, 2, 3):
        view.show({"trainer/step": step, "reward": step})
    assert [line.split()[1] for line in output.getvalue().splitlines()] == ["2/3", "3/3"]


def test_progress_view_without_a_terminal_prints_slow_steps_in_one_line_each() -> None:
    output, now = io.StringIO(), [0.0]
    view = ProgressView(Console(file=output, width=20), clock=lambda: now[0])
    view.start_stage("GRPO", 9)
    for step, seconds in ((1, 10.0), (2, LONGEST_SILENCE_S), (3, 10.0), (4, 10.0)):
        now[0] += seconds
        view.show({"trainer/step": step, "reward": 0.5})
    (line,) = output.getvalue().splitlines()
    assert line.startswith("GRPO 2/9  reward 0.500  elapsed 1:10")
