"""report.html of a run: its contents, and how a browser shows it."""

from __future__ import annotations

import asyncio
import json
import math
import runpy
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from rollout.errors import ConfigError
from tests.serve.chromium import PROGRAM, open_tab
from trainer_hooks import MetricsLogger
from trainer_hooks.metrics import JsonlWriter
from trainer_hooks.train import report
from trainer_hooks.train.report import chosen_samples, report_page, samples_section, write_report
from trainer_hooks.train.svg_charts import line_chart, stacked_chart, ticks


def sample(step: int = 2, **changed: Any) -> dict[str, Any]:
    """Return a row of completions.jsonl that two versions and a tool wrote."""
    spans = [[3, "let me see "], [None, "<result>42</result>"], [5, "so 42"]]
    return {
        "trainer/step": step,
        "group": 0,
        "sample": 0,
        "data_source": None,
        "prompt": "What is 6 * 7?",
        "spans": spans,
        "completion": "".join(text for _, text in spans),
        "reward": 1.0,
        "rewards": {"right": 1.0, "short": 0.25},
        "advantage": 0.5,
        "num_tokens": 9,
        "mean_lag": 1.0,
        "max_lag": 2,
        "train_version": 5,
        "finish_reason": "stop",
        **changed,
    }


def metric_rows(num_steps: int) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = [{"trainer/step": 0, "eval/greedy_reward": 0.1}]
    for step in range(1, num_steps + 1):
        shares = {"timing_share/train": 0.75, "timing_share/wait": 0.25, "timing_s/step": 2.0}
        ages = {"policy_staleness/hist/0": 3, "policy_staleness/hist/1": 1}
        terms = {"rewards/a<b/mean": 0.5, "rewards/short/mean": 0.0, "train/loss": math.nan}
        fates = {"rollouts/num_groups": 8, "rollouts/num_stale_groups": 2}
        if step == 2:
            fates |= {"rollouts/filtered/too_long": 3, "rollouts/num_failures/step_timeout": 1}
        rows.append({"trainer/step": step, "reward": step / 4, **terms, **shares, **ages, **fates})
    return rows


def write_run(directory: Path, num_steps: int = 2) -> None:
    with MetricsLogger(jsonl=directory / "metrics.jsonl") as logger:
        for row in metric_rows(num_steps):
            logger.log(row)
    file = JsonlWriter(directory / "completions.jsonl")
    file.log(sample())
    lost = {"reward": math.nan, "advantage": math.nan, "failure": "step_timeout"}
    file.log(sample(group=1, **lost, spans=[[None, "cut off"]], state={"score": math.nan}))
    file.close()


def parsed(page: str) -> ElementTree.Element:
    """Return the page as a tree; it must be well-formed."""
    return ElementTree.fromstring(page.removeprefix("<!DOCTYPE html>"))


def words(page: str) -> str:
    return " ".join("".join(parsed(page).itertext()).split())


def titles(page: str) -> list[str | None]:
    return [caption.text for caption in parsed(page).iter("figcaption")]


def test_report_page_has_curves_ages_times_and_samples(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path)
    monkeypatch.setattr("sys.argv", ["report", str(tmp_path), "--title", "GRPO & <own>"])
    runpy.run_path(report.__file__, run_name="__main__")
    assert capsys.readouterr().out.strip() == str(tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    assert titles(page) == [
        "reward",
        "rewards by term",
        "groups that were dropped or made again",
        "groups that were filtered, by reason",
        "rollouts that failed, by fault",
        "tokens trained on, by age in versions",
        "time of a step, shares",
    ], "no loss was finite"
    for part in (
        "GRPO & <own>",
        "0.250 → 0.500",
        "a<b",
        "stale",
        "reward 1.000",
        "failed: step_timeout",
    ):
        assert part in words(page), part
    assert "http" not in page, "nothing is fetched"
    assert "<script" not in page


def test_write_report_reads_files_of_a_killed_run_with_torn_lines(tmp_path: Path) -> None:
    write_run(tmp_path)
    for name in ("metrics.jsonl", "completions.jsonl"):
        path = tmp_path / name
        path.write_text(path.read_text() + '{"trainer/step": 3, "rew')
    assert "step 2" in words(write_report(tmp_path).read_text())


def test_report_page_of_a_run_that_ended_in_its_warm_up(tmp_path: Path) -> None:
    row = {"trainer/step": 0, "warmup/step": 5, "warmup/loss": 1.0, "warmup/reward": None}
    page = report_page([row, {**row, "warmup/step": 6}], [], "run")
    assert titles(page) == ["warm-up: loss"]
    assert "No training step is in the metrics." in words(page)
    parsed(report_page([], [], "nothing yet"))


def test_report_page_has_a_chart_per_evaluation_metric_and_a_line_per_source() -> None:
    rows = [
        {
            "trainer/step": step,
            "eval/pass@4": 0.5,
            "eval/sums/pass@4": 0.25,
            "eval/数学/pass@4": step / 10,
            "eval/maj@4": 0.5,
            "eval/greedy_reward": 0.5,
            "eval/sums/num_prompts": 64,
        }
        for step in (0, 5)
    ]
    page = report_page(rows, [], "run")
    assert titles(page) == ["reward", "held out: pass@4", "held out: maj@4"]
    assert "allsums数学" in words(page).replace(" ", "")


def test_report_page_of_ten_thousand_steps_stays_small() -> None:
    page = report_page(metric_rows(10_000), [sample(step) for step in range(1, 200)], "run")
    assert len(page) < 300_000
    parsed(page)


def test_line_chart_names_a_spike_instead_of_flattening_the_curve() -> None:
    line = [(float(step), 1.0 + step % 7) for step in range(500)]
    chart = line_chart({"norm": [*line, (500.0, 1e12)]})
    assert "values from 1 to 1e+12" in chart
    assert "values from" not in line_chart({"norm": line})


def test_line_chart_draws_one_step_and_a_flat_line() -> None:
    assert 'points="50.0' in stacked_chart([3.0], {"train": [0.5], "wait": [0.5]})
    assert "<circle" in line_chart({"reward": [(1.0, 0.0)]})
    assert "nothing recorded" in stacked_chart([], {})


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [(0.0, 1.0, [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]), (-3.0, 12.0, [0.0, 5.0, 10.0])],
)
def test_ticks_are_round_numbers(low: float, high: float, expected: list[float]) -> None:
    assert ticks(low, high) == pytest.approx(expected)


def test_samples_section_names_versions_and_marks_tool_output() -> None:
    page = f"<div>{samples_section([sample(state={'files': ['a<b']})])}</div>"
    spans = {
        "".join(span.itertext()): span.get("class")
        for article in ElementTree.fromstring(page).iter("article")
        for span in article.iter("span")
    }
    assert spans == {"v3let me see ": "age2", "<result>42</result>": "tool", "v5so 42": "age0"}
    assert "right 1.000, short 0.250" in page
    assert "a&lt;b" in page


def test_report_page_escapes_hostile_texts_and_cuts_long_ones() -> None:
    text = "\x00\x1b[31m</pre><script>alert(1)</script> 想 مرحبا " + "x" * 200_000
    page = report_page([], [sample(spans=[[5, text]], prompt=text, finish_reason="<b>")], "run")
    assert "<script" not in page
    assert len(page) < 60_000
    assert "characters left out" in words(page)
    assert "想 مرحبا" in words(page)


def test_chosen_samples_are_the_best_the_worst_and_one_between() -> None:
    rewards: dict[int, list[float | None]] = {0: [0.0, 2.0], 1: [1.0, 0.5, 0.7], 2: [1.0, None]}
    samples = [sample(group=g, reward=r) for g, each in rewards.items() for r in each]
    assert [chosen["reward"] for chosen in chosen_samples(samples, 3)] == [2.0, 0.5, None]
    steps = samples_section([sample(step) for step in range(1, 101)])
    assert steps.count("<details") == 8
    assert steps.index("step 100") < steps.index("step 1<")


def test_write_report_refuses_a_directory_without_metrics(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no metrics"):
        write_report(tmp_path)


CONTRAST = """
(() => {
  const light = colour => {
    const parts = colour.match(/[0-9.]+/g).slice(0, 3).map(Number);
    const linear = parts.map(v => v / 255).map(
        v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2];
  };
  const behind = element => {
    for (; element; element = element.parentElement) {
      const colour = getComputedStyle(element).backgroundColor;
      if (!/, 0\\)$/.test(colour)) return colour;
    }
  };
  const ratios = [...document.querySelectorAll('p, td, th, pre, span, summary, a, sup')].map(e => {
    const [a, b] = [getComputedStyle(e).color, behind(e)].map(light).sort((a, b) => b - a);
    return (a + 0.05) / (b + 0.05);
  });
  return Math.min(...ratios);
})()
"""


@pytest.mark.slow
@pytest.mark.skipif(PROGRAM is None, reason="needs Chromium")
def test_report_page_in_a_browser_fits_its_width_with_enough_contrast(
    tmp_path: Path,
) -> None:
    run = tmp_path / "run"
    run.mkdir()
    write_run(run, num_steps=40)
    with (run / "completions.jsonl").open("a") as file:
        file.write(json.dumps(sample(spans=[[2, "x" * 5_000]], prompt="y" * 500)) + "\n")
    url = write_report(run).as_uri()

    async def look() -> None:
        async with open_tab(tmp_path / "profile") as tab:
            for width in (390, 1280, 2200):
                for dark in (False, True):
                    await tab.open(url, width=width)
                    await tab.until("document.querySelectorAll('svg').length == 7")
                    picture = tmp_path / f"{width}-{dark}.png"
                    await tab.screenshot(picture, dark=dark)
                    assert await tab.evaluate("document.documentElement.scrollWidth") == width
                    assert await tab.evaluate(CONTRAST) >= 4.5  # WCAG 2.2, 1.4.3
                    assert picture.stat().st_size > 10_000
            assert tab.errors == []

    asyncio.run(look())
