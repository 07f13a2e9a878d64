"""Dashboard and its charts in a terminal, without one, and in the docs' pictures."""

import io
import math
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from rich.cells import cell_len
from rich.console import Console

from rollout.control.state import EngineState
from tests.trainer_hooks.test_time_account import stats_of
from trainer_hooks import MetricsLogger
from trainer_hooks.metrics.stage_clock import minutes
from trainer_hooks.train import Dashboard
from trainer_hooks.train.charts import curve_lines, share_bar

NUM_STEPS = 200
PICTURE = Path(__file__).parents[2] / "docs" / "images" / "dashboard.svg"


def made_up_rows(num_rows: int = 120) -> list[dict[str, Any]]:
    """Return rows of an invented run with a rising reward, whose steps mostly train."""
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
                "completions/mean_length": 143.2,
                "completions/clipped_ratio": 0.12,
                "train/entropy": 1.234,
                "train/approx_kl": 0.00012,
                "train/grad_norm": 0.451,
                "train/learning_rate": 1.25e-6,
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


def text_of(dashboard: Dashboard, width: int = 110, height: int | None = None) -> str:
    console = Console(file=io.StringIO(), width=width)
    console.print(dashboard.render(width, height))
    return console.file.getvalue()  # type: ignore[attr-defined, no-any-return]


def words_of(picture: Path) -> list[str]:
    """Return the text of an SVG, which depends less on rich's version than its drawing does."""
    texts = ElementTree.parse(picture).iter("{http://www.w3.org/2000/svg}text")
    return " ".join(text.text or "" for text in texts).split()


def test_dashboard_shows_reward_staleness_time_engines_producer_and_rates() -> None:
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
        "step 3/200", "weights version 2", "now 0.2", "12,750 tokens/s", "engines, 3% idle",
        "57%", "train 75%", "wait 8%", "running", "paused", "118", "1 waiting batches", "96 groups",
    ):  # fmt: skip
        assert part in shown, part
    assert "weights version 2" in output.getvalue()


def test_dashboard_without_a_terminal_prints_a_line_per_line_interval(tmp_path: Path) -> None:
    output = io.StringIO()
    dashboard = Dashboard(Console(file=output, width=200), line_interval=2)
    dashboard.start_stage("GRPO", 4)
    with MetricsLogger(jsonl=tmp_path / "m.jsonl", console=dashboard) as logger:
        for row in made_up_rows(4):
            logger.log(row, step=row["trainer/step"], version=row["rollout/version"])
    lines = output.getvalue().splitlines()
    assert [line.split()[1] for line in lines] == ["2/4", "4/4"]
    assert "engines idle 3%" in lines[0]


def test_dashboard_drops_old_bins_of_a_shorter_histogram() -> None:
    dashboard = Dashboard(Console(file=io.StringIO()))
    dashboard.show({"policy_staleness/hist/0": 10, "policy_staleness/hist/1": 10})
    dashboard.show({"policy_staleness/hist/0": 10})
    assert "100%" in text_of(dashboard)
    dashboard.show({"reward": 1.0, "trainer/step": 1})
    assert "100%" in text_of(dashboard)


def test_dashboard_resets_counts_that_a_row_lacks() -> None:
    dashboard = Dashboard(Console(file=io.StringIO()))
    dashboard.show({"rollouts/num_groups": 8, "rollouts/filtered/too_long": 3})
    assert "8 groups, 3 filtered: too long" in text_of(dashboard)
    dashboard.show({"producer/max_staleness_versions": 3, "producer/ess": 0.875})
    assert "3 filtered: too long, bound 3 versions (effective sample size 88%)" in text_of(
        dashboard
    )
    dashboard.show({"rollouts/num_groups": 8})
    assert "filtered" not in text_of(dashboard)


def test_dashboard_shows_no_gradient_of_an_earlier_step() -> None:
    dashboard = Dashboard(Console(file=io.StringIO()))
    dashboard.show({"trainer/step": 1, "train/grad_norm": 0.5, "train/learning_rate": 1e-6})
    assert "grad 0.50   lr 1e-06" in text_of(dashboard)
    dashboard.show({"trainer/step": 2, "train/learning_rate": 1e-6})
    assert "grad" not in text_of(dashboard)
    assert "lr 1e-06" in text_of(dashboard)


def test_dashboard_announces_in_place_of_an_earlier_text() -> None:
    output = io.StringIO()
    dashboard = Dashboard(Console(file=output, force_terminal=True, width=80, height=24))
    dashboard.announce("stopping soon")
    assert "stopping soon" in output.getvalue(), "before the dashboard is drawn"
    dashboard.show({"trainer/step": 1})
    dashboard.announce("stopping now")
    dashboard.close()
    assert text_of(dashboard).startswith("stopping now")
    assert "stopping now" in output.getvalue()


def test_dashboard_draws_no_reward_of_a_failed_batch() -> None:
    dashboard = Dashboard(Console(file=io.StringIO(), force_terminal=True, width=80, height=24))
    dashboard.show({"trainer/step": 1, "reward": math.nan})
    assert "no step yet" in text_of(dashboard)
    dashboard.show({"trainer/step": 2, "reward": 0.25})
    dashboard.show({"trainer/step": 3, "reward": math.nan})
    dashboard.close()
    assert "now 0.250" in text_of(dashboard)


def test_dashboard_recall_continues_the_curve_of_a_resumed_run() -> None:
    dashboard = Dashboard(Console(file=io.StringIO()))
    dashboard.recall([{"reward": 0.75}, {"reward": None}, {"eval/greedy_reward": 0.5}])
    dashboard.show({"trainer/step": 7, "reward": 0.25})
    assert "now 0.250   best 0.750" in text_of(dashboard)
    assert "held out 0.500" in text_of(dashboard)


def test_dashboard_leaves_missing_values_out() -> None:
    dashboard = Dashboard(Console(file=io.StringIO()))
    dashboard.show({"trainer/step": 1, "reward": None, "timing_share/train": None})
    dashboard.show({"engine/num_running": 5, "engine/num_waiting": 2})
    shown = text_of(dashboard)
    assert "no step yet" in shown
    assert "no tokens yet" in shown
    assert "5" in shown


def long_samples() -> list[dict[str, Any]]:
    return [
        {
            "trainer/step": 3,
            "prompt": "想一想 " * 200,
            "reward": 0.5,
            "rewards": {"right": 1.0, "length": None},
            "advantage": 0.25,
            "spans": [[2, "word " * 300], [None, "\x1b[2Jcleared"], [3, f"end{i}"]],
            "num_tokens": 312,
            "mean_lag": 0.5,
            "finish_reason": "stop",
        }
        for i in range(3)
    ]


@pytest.mark.parametrize(
    ("width", "height", "num_samples"), [(80, 23, 1), (80, 30, 2), (120, 39, 3), (200, 49, 3)]
)
def test_dashboard_fits_the_terminal_and_gives_samples_the_remaining_lines(
    width: int, height: int, num_samples: int
) -> None:
    dashboard = Dashboard(Console(file=io.StringIO()), num_steps=NUM_STEPS)
    for row in made_up_rows(30):
        dashboard.show(row)
    dashboard.show_engines({"own": made_up_engines()["0"]})
    dashboard.show_progress(312, 512, reward=0.625)
    dashboard.show_samples(long_samples())
    lines = text_of(dashboard, width, height).splitlines()
    assert len(lines) <= height
    assert {cell_len(line) for line in lines} == {width}
    shown = "\n".join(lines)
    for part in (
        "312 of 512 samples", "next batch 0.625", "tokens/s sampled", "trained on", "running",
        "■ train", "length 143 (12% cut)", "entropy 1.23", "approx_kl 1.2e-04", "grad 0.45",
        "lr 1.3e-06",
    ):  # fmt: skip
        assert part in shown, part
    assert shown.count("reward 0.500  (right 1.000, length -)") == num_samples
    assert "\x1b" not in shown, "a completion cannot steer the terminal"
    assert ("␛[2Jcleared" in shown) == (num_samples == 3), "the middle is left out"


def test_dashboard_sums_up_engines_and_bins_if_lines_are_few() -> None:
    dashboard = Dashboard(Console(file=io.StringIO()))
    dashboard.show({"reward": 0.5, **{f"policy_staleness/hist/{age}": 10 for age in range(10)}})
    engine = made_up_engines()["0"]
    dashboard.show_engines({str(rank): engine for rank in range(40)})
    shown = text_of(dashboard, 80, 24)
    assert "and 36 more" in shown
    assert "7+" in shown
    assert "30%" in shown, "ages 7 to 9"
    assert "and" not in text_of(dashboard).split("and producer")[1]


def test_dashboard_shows_an_engines_rate_and_kv_cache_use() -> None:
    now = [0.0]
    dashboard = Dashboard(Console(file=io.StringIO()), clock=lambda: now[0])
    first = replace(made_up_engines()["0"], num_blocks_used=30, num_blocks_total=40)
    dashboard.show_engines({"0": first})
    assert " 75% " in text_of(dashboard)
    for total in (1_000, 3_000, 500):  # the last is a new engine's, which counts from 0
        dashboard.show_engines({"0": replace(first, num_sampled_tokens=total)})
        now[0] += 2.0
    assert "1,000" not in text_of(dashboard)
    dashboard.show_engines({"0": replace(first, num_sampled_tokens=1_500)})
    assert " 500 " in text_of(dashboard), "1,000 tokens in two seconds"


def test_curve_lines_have_the_given_width_and_a_scale() -> None:
    lines = curve_lines([float(i) for i in range(1000)], width=20, height=3)
    assert [len(line) for line in lines] == [28, 28, 28]
    assert lines[0].startswith("974.500")
    assert lines[0].endswith("█")
    assert lines[-1].startswith(" 24.500 ▁")
    assert curve_lines([0.5], width=20, height=2)[-1].endswith("▁")


def test_share_bar_always_has_the_given_width() -> None:
    console = Console(file=io.StringIO(), width=200)
    for shares in ({"train": 1.0}, {"train": 1 / 3, "wait": 1 / 3, "other": 1 / 3}):
        console.print(share_bar(shares, 72))
    bars = [line for line in console.file.getvalue().splitlines() if "█" in line]  # type: ignore[attr-defined]
    assert [bar.count("█") for bar in bars] == [72, 72]


def test_pictures_of_the_docs_show_this_dashboard_and_are_small() -> None:
    # `scripts/run_pictures.py` draws them again.
    panels = "reward policy staleness, tokens time of a step engines, and producer samples"
    assert set(panels.split()) <= set(words_of(PICTURE))
    assert {"training", "generating", "evaluating"} & set(words_of(PICTURE))
    for name in ("dashboard.svg", "report.png", "report-samples.png"):
        assert PICTURE.with_name(name).stat().st_size < 300_000, name


def test_dashboard_stage_shows_progress_of_the_next_batch_and_time_left() -> None:
    now = [100.0]
    dashboard = Dashboard(Console(file=io.StringIO()), clock=lambda: now[0])
    dashboard.start_stage("GRPO", 20)
    for step in (11, 12):  # a resumed run's first steps
        now[0] += 65.0
        dashboard.show({"trainer/step": step, "reward": 0.5})
    dashboard.show_progress(312, 512, "train")
    shown = text_of(dashboard)
    assert "312 of 512 samples" in shown
    assert "training" in shown
    assert "elapsed 2:10, left 8:40" in shown  # 2 steps took 130 s, 8 are left
    dashboard.show({"trainer/step": 13})
    assert " 0 of 512 samples" in text_of(dashboard), "a new step begins"
    assert (minutes(7), minutes(3787)) == ("0:07", "1:03:07")
