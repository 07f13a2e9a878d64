"""Warnings of steps in rows: when they are shown, where they go, and what a run says at its end."""

import io
from pathlib import Path
from typing import Any

from rich.console import Console

from tests.trainer_hooks.fakes import FakeWandbRun
from trainer_hooks import MetricsLogger
from trainer_hooks.metrics import ProgressView, read_jsonl, run_warnings
from trainer_hooks.metrics.step_warnings import WarningFilter
from trainer_hooks.train import Dashboard


def row(step: int, *kinds: str) -> dict[str, Any]:
    """Return a step's row with a warning of each of the `kinds`."""
    warnings = {kind: f"step {step}: {kind}." for kind in kinds}
    return {"trainer/step": step, "reward": 0.0, **({"warnings": warnings} if kinds else {})}


def test_warning_filter_shows_a_lasting_warning_at_once_and_each_tenth_step_with_a_count() -> None:
    shown, warnings = {}, WarningFilter()
    for step in range(1, 23):
        for text in warnings.due(row(step, "same_scores")).values():
            shown[step] = text
        assert warnings.due({"engine/num_running": 1}) == {}, "not a step"
    assert shown == {
        1: "step 1: same_scores.",
        11: "step 11: same_scores. So in 10 of the last 10 steps.",
        21: "step 21: same_scores. So in 10 of the last 10 steps.",
    }


def test_warning_filter_shows_each_kind_by_itself_and_one_that_comes_back_with_its_count() -> None:
    warnings = WarningFilter()
    assert list(warnings.due(row(1, "same_scores"))) == ["same_scores"]
    assert list(warnings.due(row(2, "same_scores", "all_cut"))) == ["all_cut"]
    for step in range(3, 31):
        assert warnings.due(row(step)) == {}
    assert warnings.due(row(31, "same_scores")) == {
        "same_scores": "step 31: same_scores. So in 2 of the last 30 steps."
    }


def test_run_warnings_count_the_steps_of_each_kind() -> None:
    rows = [
        {"warmup/step": 1},
        row(1, "all_cut"),
        row(2, "all_cut", "same_scores"),
        row(3),
        {"eval/greedy_reward": 0.0},
    ]
    assert run_warnings(rows) == [
        "in 2 of 3 steps every completion was cut by the length limit",
        "in 1 of 3 steps every group scored the same: nothing was learned from the reward",
    ]
    assert run_warnings([row(1)]) == []


def test_metrics_logger_writes_all_warnings_to_jsonl_and_sends_those_due_to_wandb(
    tmp_path: Path,
) -> None:
    run = FakeWandbRun()
    with MetricsLogger(jsonl=tmp_path / "m.jsonl", wandb=run) as logger:
        for step in (1, 2):
            logger.log(row(step, "same_scores"), step=step)
        logger.log_summary({"warnings": ["in 2 of 2 steps"]})
    assert [r["warnings"] for r in read_jsonl(tmp_path / "m.jsonl")] == [
        {"same_scores": "step 1: same_scores."},
        {"same_scores": "step 2: same_scores."},
    ]
    assert run.alerts == [("same scores", "step 1: same_scores.", "WARN")]
    assert not any("warnings" in row for row in run.rows), "numbers alone are drawn"
    assert run.summary == {"warnings": ["in 2 of 2 steps"]}


def test_progress_view_prints_a_warning_in_red_between_the_interval_lines() -> None:
    for is_terminal in (False, True):
        output = io.StringIO()
        console = Console(
            file=output, width=100, force_terminal=is_terminal, color_system="standard"
        )
        view = ProgressView(console)
        view.start_stage("GRPO", 20)
        for step in (1, 2, 3):
            view.show(row(step, "same_scores"))
        view.close()
        assert output.getvalue().count("same_scores.") == 1
        assert "\x1b[1;31mstep 1: same_scores.\x1b[0m" in output.getvalue()


def test_dashboard_shows_the_warnings_of_the_latest_step_in_red() -> None:
    console = Console(file=io.StringIO(), width=80, force_terminal=True, color_system="standard")
    dashboard = Dashboard(console)
    dashboard.show(row(1, "same_scores", "all_cut"))
    dashboard.show({"engine/num_running": 1})

    def shown() -> str:
        with console.capture() as capture:
            console.print(dashboard.render(80, 23))
        return capture.get()

    assert "\x1b[1;31mstep 1: same_scores." in shown()
    assert "\x1b[1;31mstep 1: all_cut." in shown()
    dashboard.show(row(2))
    assert "same_scores" not in shown()
    dashboard.close()


def test_dashboard_without_a_terminal_prints_a_warning_once() -> None:
    output = io.StringIO()
    dashboard = Dashboard(Console(file=output, width=80))
    dashboard.start_stage("GRPO", 20)
    for step in (1, 2):
        dashboard.show(row(step, "same_scores"))
    assert output.getvalue() == "step 1: same_scores.\n"
