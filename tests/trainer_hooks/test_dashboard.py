"""The dashboard in a terminal, without one, and as a picture."""

import io
import math
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from rich.console import Console

from rollout.engine.state import EngineState
from tests.trainer_hooks.test_time_account import stats_of
from trainer_hooks import MetricsLogger
from trainer_hooks.jobs import Dashboard, write_run_picture
from trainer_hooks.jobs.charts import curve_lines, share_bar
from trainer_hooks.jobs.dashboard import minutes
from trainer_hooks.jobs.dashboard_picture import main, write_dashboard_picture

NUM_STEPS = 200
PICTURE = Path(__file__).parents[2] / "docs" / "images" / "dashboard.svg"


def made_up_rows(num_rows: int = 120) -> list[dict[str, Any]]:
    """Rows of a run that never was: a reward that rises, and steps that mostly train."""
    rows = []
    for step in range(1, num_rows + 1):
        wait = 0.06 + 0.04 * math.sin(step / 7)
        rows.append(
            {
                "trainer/step": step,
                "rollout/version": step - 1,
                "reward": 0.2 + 0.75 / (1 + math.exp(-(step - 60) / 15)) + 0.02 * math.sin(step),
                "policy_staleness/hist/0": 5_210,
                "policy_staleness/hist/1": 8_904,
                "policy_staleness/hist/2": 1_377,
                "completions/tokens_per_s": 12_480.0 + 90 * (step % 5),
                "train/tokens_per_s": 11_920.0,
                "engine/idle_share": 0.031,
                "timing_s/step": 1.24,
                "timing_share/train": 0.83 - wait,
                "timing_share/wait": wait,
                "timing_share/update": 0.05,
                "timing_share/reward": 0.08,
                "timing_share/other": 0.04,
                "rollouts/num_waiting_batches": 1,
                "rollouts/num_groups": 96,
                "rollouts/num_filtered_groups": 14 + step,
                "rollouts/num_failed_samples": 2,
            }
        )
    return rows


def made_up_engines() -> dict[str, Any]:
    running = replace(stats_of(90.0, 1_000), num_running=64, num_waiting=12, weights_version=119)
    return {
        "0": running,
        "1": replace(running, num_running=61, num_waiting=9),
        "2": replace(running, state=EngineState.PAUSED, num_running=0, weights_version=118),
    }


def text_of(dashboard: Dashboard) -> str:
    console = Console(file=io.StringIO(), width=110)
    console.print(dashboard.render())
    return console.file.getvalue()  # type: ignore[attr-defined, no-any-return]


def words_of(picture: Path) -> list[str]:
    """The text of an SVG, which depends less on the version of rich than its drawing does."""
    texts = ElementTree.parse(picture).iter("{http://www.w3.org/2000/svg}text")
    return " ".join(text.text or "" for text in texts).split()


def test_a_terminal_shows_reward_staleness_time_engines_producer_and_rates() -> None:
    output = io.StringIO()
    dashboard = Dashboard(Console(file=output, force_terminal=True, width=110))
    dashboard.start_stage("GRPO", NUM_STEPS)
    for row in made_up_rows(3):
        dashboard.show(row)
    dashboard.show_engines(made_up_engines())
    dashboard.close()
    dashboard.close()
    shown = text_of(dashboard)
    for part in (
        "step 3/200", "weights version 2", "now 0.2", "12,750 tokens/s", "engines idle 3%",
        "57%", "train 75", "wait 7", "running", "paused", "118", "num waiting batches", "96",
    ):  # fmt: skip
        assert part in shown, part
    assert "weights version 2" in output.getvalue()


def test_without_a_terminal_a_line_is_printed_at_its_interval(tmp_path: Path) -> None:
    output = io.StringIO()
    dashboard = Dashboard(Console(file=output, width=200), line_interval=2)
    dashboard.start_stage("GRPO", 4)
    with MetricsLogger(jsonl=tmp_path / "m.jsonl", console=dashboard) as logger:
        for row in made_up_rows(4):
            logger.log(row, step=row["trainer/step"], version=row["rollout/version"])
    lines = output.getvalue().splitlines()
    assert [line.split()[1] for line in lines] == ["2/4", "4/4"]
    assert "engines idle 3%" in lines[0]


def test_a_histogram_that_got_shorter_leaves_no_old_bins() -> None:
    dashboard = Dashboard(Console(file=io.StringIO()))
    dashboard.show({"policy_staleness/hist/0": 10, "policy_staleness/hist/1": 10})
    dashboard.show({"policy_staleness/hist/0": 10})
    assert "100%" in text_of(dashboard)
    dashboard.show({"reward": 1.0, "trainer/step": 1})
    assert "100%" in text_of(dashboard)


def test_values_that_are_missing_or_none_are_left_out() -> None:
    dashboard = Dashboard(Console(file=io.StringIO()))
    dashboard.show({"trainer/step": 1, "reward": None, "timing_share/train": None})
    dashboard.show({"engine/num_running": 5, "engine/num_waiting": 2})
    shown = text_of(dashboard)
    assert "no step yet" in shown
    assert "no tokens yet" in shown
    assert "5" in shown


def test_a_curve_is_as_wide_as_asked_and_labelled_with_its_range() -> None:
    lines = curve_lines([float(i) for i in range(1000)], width=20, height=3)
    assert [len(line) for line in lines] == [28, 28, 28]
    assert lines[0].startswith("974.500")
    assert lines[0].endswith("█")
    assert lines[-1].startswith(" 24.500 ▁")
    assert curve_lines([0.5], width=20, height=2)[-1].endswith("▁")


def test_a_bar_of_shares_has_one_width_whatever_the_shares() -> None:
    console = Console(file=io.StringIO(), width=200)
    for shares in ({"train": 1.0}, {"train": 1 / 3, "wait": 1 / 3, "other": 1 / 3}):
        console.print(share_bar(shares))
    bars = [line for line in console.file.getvalue().splitlines() if "█" in line]  # type: ignore[attr-defined]
    assert [bar.count("█") for bar in bars] == [72, 72]


def test_the_picture_of_the_docs_is_what_the_dashboard_draws(tmp_path: Path) -> None:
    path = tmp_path / "dashboard.svg"
    write_dashboard_picture(
        path,
        made_up_rows(),
        title="GRPO, made-up numbers",
        num_steps=NUM_STEPS,
        engines=made_up_engines(),
    )
    assert words_of(path) == words_of(PICTURE)
    assert "reward" in words_of(PICTURE)


def test_a_picture_can_be_drawn_from_a_file_of_metrics(tmp_path: Path, monkeypatch: Any) -> None:
    with MetricsLogger(jsonl=tmp_path / "m.jsonl") as logger:
        logger.log({"reward": 0.5}, step=1, version=0)
    monkeypatch.setattr("sys.argv", ["x", str(tmp_path / "m.jsonl"), str(tmp_path / "d.svg")])
    main()
    assert "reward" in (tmp_path / "d.svg").read_text()


def test_a_stage_shows_the_rollouts_of_the_next_batch_and_how_long_the_rest_takes() -> None:
    now = [100.0]
    dashboard = Dashboard(Console(file=io.StringIO()), clock=lambda: now[0])
    dashboard.start_stage("GRPO", 20)
    dashboard.show({"trainer/step": 11})  # a resumed run's first step
    dashboard.show({"trainer/step": 12, "reward": 0.5})
    dashboard.show_progress(312, 512)
    now[0] += 130.0
    shown = text_of(dashboard)
    assert "312 of 512 rollouts" in shown
    assert "elapsed 2:10, left about 8:40" in shown  # 2 steps took 130 s, 8 are left
    dashboard.show({"trainer/step": 13})
    assert "rollouts" not in text_of(dashboard).splitlines()[0], "a new step begins"
    assert (minutes(7), minutes(3787)) == ("0:07", "1:03:07")


def test_the_picture_of_a_run_has_its_three_panels(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    rows = [{"trainer/step": 0, "eval/greedy_reward": 0.1}, *made_up_rows(3)]
    write_run_picture(tmp_path / "run.svg", rows, "GRPO")
    write_run_picture(tmp_path / "none.svg", [], "no step")
    assert (tmp_path / "run.svg").read_text().count('id="axes_') == 3
    assert (tmp_path / "none.svg").exists()
