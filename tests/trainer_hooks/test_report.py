"""`rollout report`: the page of a run, of its seeds and of several runs, and a browser's view."""

from __future__ import annotations

import asyncio
import json
import math
import re
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from rollout.errors import ConfigError
from tests.serve.chromium import PROGRAM, open_tab
from trainer_hooks.metrics import JsonlWriter
from trainer_hooks.train.report import run, write_report
from trainer_hooks.train.report_samples import chosen_samples, samples_section


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


def metric_rows(num_steps: int, gain: float = 0.25) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = [
        {"trainer/step": 0, "eval/greedy_reward": 0.1, "eval/num_prompts": 64}
    ]
    for step in range(1, num_steps + 1):
        shares = {"timing_share/train": 0.75, "timing_share/wait": 0.25, "timing_s/step": 2.0}
        ages = {"policy_staleness/hist/0": 3, "policy_staleness/hist/1": 1}
        terms = {"rewards/a<b/mean": 0.5, "rewards/short/mean": 0.0, "train/loss": math.nan}
        fates = {"rollouts/num_groups": 8, "rollouts/num_stale_groups": 2}
        if step == 2:
            fates |= {"rollouts/filtered/too_long": 3, "rollouts/num_failures/step_timeout": 1}
        rows.append(
            {"trainer/step": step, "reward": step * gain, **terms, **shares, **ages, **fates}
        )
    return rows


def write_rows(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with closing(JsonlWriter(path)) as file:
        for row in rows:
            file.log(row)


def write_run(
    directory: Path,
    rows: Sequence[dict[str, Any]] | None = None,
    samples: Sequence[dict[str, Any]] = (),
) -> Path:
    """Write the files of a seed's results and return its directory."""
    write_rows(directory / "metrics.jsonl", metric_rows(2) if rows is None else rows)
    if samples:
        write_rows(directory / "completions.jsonl", samples)
    return directory


def page_of(directory: Path, rows: Sequence[dict[str, Any]], *samples: dict[str, Any]) -> str:
    return write_report(write_run(directory, rows, samples)).read_text(encoding="utf-8")


def parsed(page: str) -> ElementTree.Element:
    """Return the page as a tree; it must be well-formed."""
    return ElementTree.fromstring(page.removeprefix("<!DOCTYPE html>"))


def words(page: str) -> str:
    return " ".join("".join(parsed(page).itertext()).split())


def titles(page: str) -> list[str | None]:
    return [caption.text for caption in parsed(page).iter("figcaption")]


def shown_values(page: str, title: str) -> dict[str, dict[str, str]]:
    """Return the values that the chart `title` shows under the pointer, by line and position."""
    (figure,) = (f for f in parsed(page).iter("figure") if f[0].text == title)
    chart = json.loads(figure[1].attrib["data-values"])
    return {
        name: {x: text for x, text in zip(chart["x"], texts, strict=True) if text is not None}
        for name, _, texts in chart["lines"]
    }


def test_rollout_report_writes_curves_ages_times_lengths_and_samples(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lost = {"reward": math.nan, "advantage": math.nan, "failure": "step_timeout"}
    failed = sample(group=1, **lost, spans=[[None, "cut off"]], state={"score": math.nan})
    write_run(tmp_path, samples=[sample(), failed])
    assert run([str(tmp_path), "--title", "GRPO & <own>"]) == 0
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
        "staleness of all tokens trained on",
        "lengths of samples, tokens",
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
    assert shown_values(page, "staleness of all tokens trained on") == {
        str(tmp_path.name): {"staleness 0": "75.0%", "staleness 1": "25.0%"}
    }
    assert shown_values(page, "lengths of samples, tokens") == {
        "step 2": {f"{n} to {n} tokens": f"{100 * (n == 9)}.0%" for n in range(10)}
    }, "the failed sample is not counted"
    assert not re.search(r"""(src|href)=["'](?!#)|url\(|@import""", page), "nothing is fetched"


def test_report_shows_the_value_of_each_line_at_each_step(tmp_path: Path) -> None:
    evaluation = {"trainer/step": 2, "eval/greedy_reward": 0.6, "eval/num_prompts": 64}
    page = page_of(tmp_path, [*metric_rows(3), evaluation])
    assert shown_values(page, "reward") == {
        "sampled": {"step 1": "0.25", "step 2": "0.5", "step 3": "0.75"},
        "held out, greedy (n=64)": {"step 0": "0.1", "step 2": "0.6"},
    }
    assert shown_values(page, "time of a step, shares")["train"]["step 3"] == "75.0%"


def test_report_says_what_ran_and_links_to_its_settings(tmp_path: Path) -> None:
    seed = write_run(tmp_path / "sums & more" / "seed_0")
    start = {
        "title": "GRPO, sums",
        "model": "models/<tiny>",
        "command": "rollout train data.path='a & b.jsonl'",
        "overrides": ["data.path=a & b.jsonl"],
        "num_ranks": 1,
        "versions": {"rollout": "1.2", "torch": "2.13"},
        "commit": "0123abc-dirty",
        "wandb": "W&B: https://wandb.ai/me/sums/runs/<1>",
    }
    times = [{"trainer/step": 0, "time": "2026-01-01"}, {"trainer/step": 1, "time": "2026-01-02"}]
    write_rows(seed / "starts.jsonl", [start | time for time in times])
    (seed / "config.yaml").write_text("seed: 0\n")
    page = write_report(seed, output=tmp_path / "pages" / "own.html").read_text()
    about = {row[0].text: "".join(row[1].itertext()) for row in parsed(page).iter("tr")}
    expected = {
        "algorithm, data": "GRPO, sums",
        "model": "models/<tiny>",
        "command": "rollout train data.path='a & b.jsonl'",
        "overrides": "data.path=a & b.jsonl",
        "versions": "rollout 1.2, torch 2.13",
        "commit": "0123abc-dirty",
        "started": "2026-01-02, start 2, from step 1",
        "Weights & Biases": "https://wandb.ai/me/sums/runs/<1>",
        "settings": "config.yaml",
    }
    assert about | expected == about
    assert "ranks of torchrun" not in about
    links = [link.attrib["href"] for link in parsed(page).iter("a")]
    assert "../sums%20%26%20more/seed_0/config.yaml" in links
    assert "https://wandb.ai/me/sums/runs/<1>" in links
    assert "GRPO, sums, seed 0" in words(page)


def test_report_begins_with_the_warnings_of_each_seed(tmp_path: Path) -> None:
    text = "step 2: every group scored 0.000; a sample ends <|im_end|>"
    rows = metric_rows(2)
    rows[-1]["warnings"] = {"same_scores": text}
    page = page_of(tmp_path / "sums" / "seed_0", rows)
    sentence = "in 1 of 2 steps every group scored the same: nothing was learned from the reward"
    (shown,) = (e for e in parsed(page).iter("ul") if e.get("class") == "warnings")
    assert [item.text for item in shown] == [sentence, text]
    assert page.index(sentence) < page.index("Results")
    write_run(tmp_path / "sums" / "seed_1")
    both = write_report(tmp_path / "sums").read_text()
    assert f"sums, seed_0: {sentence}" in words(both)
    assert "seed_1: in" not in words(both)


def test_report_of_several_seeds_draws_their_mean_and_range(tmp_path: Path) -> None:
    for seed, gain in enumerate((0.1, 0.2, 0.3)):
        write_run(tmp_path / "sums" / f"seed_{seed}", metric_rows(4, gain))
    write_run(tmp_path / "sums" / "seed_0.previous", metric_rows(4, 9.0))
    page = write_report(tmp_path / "sums").read_text()
    assert shown_values(page, "reward")["sampled"]["step 4"] == "0.8 (0.4 to 1.2)"
    assert "mean of 3 seeds; band: lowest to highest" in words(page)
    assert 'class="range fill0"' in page
    head, first, *_ = parsed(page).iter("tr")
    assert [cell.text for cell in head[1:]] == [
        "mean of 3 seeds (range)",
        *(f"seed {seed}" for seed in range(3)),
    ]
    assert first[1].text == "0.100 (n=64)"
    assert "0.300 (0.150 to 0.450) → 0.700 (0.350 to 1.050)" in words(page)


def test_rollout_report_of_several_runs_draws_them_over_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write_run(Path("a", "seed_0"), metric_rows(4, 0.1))
    write_run(Path("a", "seed_1"), metric_rows(4, 0.3))
    write_run(Path("b", "seed_0"), metric_rows(2, 0.5), [sample()])
    write_run(Path("b", "seed_0.previous"))
    assert run(["a", "b", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"path": "report-a-b.html"}
    page = Path("report-a-b.html").read_text()
    assert shown_values(page, "reward: sampled") == {
        "a, 2 seeds": {
            "step 1": "0.2 (0.1 to 0.3)",
            "step 2": "0.4 (0.2 to 0.6)",
            "step 3": "0.6 (0.3 to 0.9)",
            "step 4": "0.8 (0.4 to 1.2)",
        },
        "b": {"step 1": "0.5", "step 2": "1"},
    }
    assert shown_values(page, "lengths of the last steps' samples, tokens")["b"]
    assert "0.300 (0.150 to 0.450) → 0.700 (0.350 to 1.050)" in words(page)
    assert "<h1>a · b</h1>" in page


def test_report_of_many_runs_draws_no_bands_and_says_so(tmp_path: Path) -> None:
    runs = [tmp_path / name for name in "abcde"]
    for directory in runs:
        for seed in (0, 1):
            write_run(directory / f"seed_{seed}", metric_rows(2, 0.1 + seed))
    page = write_report(*runs[:4], output=tmp_path / "four.html").read_text()
    assert "mean of seeds; band: lowest to highest" in words(page)
    assert 'class="range' in page
    page = write_report(*runs, output=tmp_path / "five.html").read_text()
    assert "mean of seeds" in words(page)
    assert "band: lowest" not in words(page)
    assert 'class="range' not in page


def test_report_names_runs_by_what_differs_in_their_paths(tmp_path: Path) -> None:
    runs = [
        write_run(tmp_path / where / "sums" / "seed_0", metric_rows(2)) for where in ("old", "new")
    ]
    page = write_report(*runs, output=tmp_path / "both.html").read_text()
    assert "<h1>old/sums/seed_0 · new/sums/seed_0</h1>" in page
    page = write_report(*(run.parent for run in runs), output=tmp_path / "both.html").read_text()
    assert "<h1>old/sums · new/sums</h1>" in page


def test_write_report_reads_files_of_a_killed_run_with_torn_lines(tmp_path: Path) -> None:
    write_run(tmp_path, samples=[sample()])
    for name in ("metrics.jsonl", "completions.jsonl"):
        path = tmp_path / name
        path.write_text(path.read_text() + '{"trainer/step": 3, "rew')
    assert "step 2" in words(write_report(tmp_path).read_text())


def test_report_of_a_run_that_ended_in_its_warm_up(tmp_path: Path) -> None:
    row = {"trainer/step": 0, "warmup/step": 5, "warmup/loss": 1.0, "warmup/reward": None}
    page = page_of(tmp_path / "run", [row, {**row, "warmup/step": 6}])
    assert titles(page) == ["warm-up: loss"]
    assert "No training step is in the metrics." in words(page)
    parsed(page_of(tmp_path / "empty", []))


def test_report_has_a_chart_per_evaluation_metric_and_a_line_per_source(tmp_path: Path) -> None:
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
    page = page_of(tmp_path, rows)
    assert titles(page) == ["reward", "held out: pass@4", "held out: maj@4"]
    assert list(shown_values(page, "held out: pass@4")) == ["all", "sums (n=64)", "数学"]


def test_report_of_ten_thousand_steps_stays_small(tmp_path: Path) -> None:
    page = page_of(tmp_path, metric_rows(10_000), *(sample(step) for step in range(1, 200)))
    assert len(page) < 300_000
    parsed(page)


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


def test_report_escapes_hostile_texts_and_cuts_long_ones(tmp_path: Path) -> None:
    text = "\x00\x1b[31m</pre><script>alert(1)</script> 想 مرحبا " + "x" * 200_000
    rows = [{"trainer/step": 1, "reward": 1.0, "eval/'><script>alert(2)</script>/pass@1": 1.0}]
    hostile = sample(1, spans=[[5, text]], prompt=text, finish_reason="<b>")
    page = page_of(tmp_path, rows, hostile)
    assert page.count("<script") == 1, "only the page's own"
    assert len(page) < 70_000
    assert "characters left out" in words(page)
    assert "想 مرحبا" in words(page)


def test_chosen_samples_are_the_best_the_worst_and_one_between() -> None:
    rewards: dict[int, list[float | None]] = {0: [0.0, 2.0], 1: [1.0, 0.5, 0.7], 2: [1.0, None]}
    samples = [sample(group=g, reward=r) for g, each in rewards.items() for r in each]
    assert [chosen["reward"] for chosen in chosen_samples(samples, 3)] == [2.0, 0.5, None]
    steps = samples_section([sample(step) for step in range(1, 101)])
    assert steps.count("<details") == 8
    assert steps.index("step 100") < steps.index("step 1<")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["nowhere"], "nowhere holds no metrics.jsonl, nor seed_* directories with one; name"),
        (["sums", "./sums"], "/sums is given twice"),
        (["sums", "--metric", "reward"], "--metric reward chooses what --figure FILE draws"),
        (["sums", "--figure", "a.svg", "--output", "b"], "--output b with --figure"),
        (["sums", "--figure", "a.gif"], "a.gif is no kind of figure; name a file in .pdf, .svg"),
        (["sums", "--figure", "a.svg", "--metric", "rewrd"], "of rewrd; did you mean reward?"),
        (["sums", "--colour"], "unrecognized arguments: --colour; see rollout report --help"),
    ],
)
def test_rollout_report_names_what_is_wrong(
    given: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_run(Path("sums", "seed_0"))
    with pytest.raises(ConfigError, match=re.escape(message)):
        run(given)
    assert [path.name for path in tmp_path.iterdir()] == ["sums"]


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
  const texts = document.querySelectorAll('p, td, th, li, pre, span, summary, a, sup');
  const ratios = [...texts].map(e => {
    const [a, b] = [getComputedStyle(e).color, behind(e)].map(light).sort((a, b) => b - a);
    return (a + 0.05) / (b + 0.05);
  });
  return Math.min(...ratios);
})()
"""


# Move the pointer over the chart of the reward and return the values that are shown.
POINT = """
(() => {
  const svg = document.querySelector("figure svg"), area = svg.getBoundingClientRect();
  const where = {clientX: area.left + area.width * SHARE, clientY: area.top + 50};
  svg.dispatchEvent(new PointerEvent("pointermove", where));
  const box = document.querySelector(".values"), shown = box.getBoundingClientRect();
  const isInside = 0 <= shown.left && shown.right <= document.documentElement.clientWidth;
  return [box.hidden, isInside, [...box.children].map(line => line.textContent).join("; ")];
})()
"""


@pytest.mark.slow
@pytest.mark.skipif(PROGRAM is None, reason="needs Chromium")
def test_report_in_a_browser_fits_its_width_has_contrast_and_shows_values(tmp_path: Path) -> None:
    rows = metric_rows(40)
    rows[-1]["warnings"] = {"same_scores": "every group scored 0.000 " + "x" * 300}
    long = sample(spans=[[2, "x" * 5_000]], prompt="y" * 500)
    alone = write_report(write_run(tmp_path / "run" / "seed_0", rows, [sample(), long]))
    write_run(tmp_path / "run" / "seed_1", metric_rows(40, 0.5))
    other = write_run(tmp_path / "another-run-with-a-long-name" / "seed_0", rows, [sample()])
    several = write_report(tmp_path / "run", other, output=tmp_path / "several.html")

    async def look() -> None:
        async with open_tab(tmp_path / "profile") as tab:
            for page, width in ((alone, 390), (alone, 1280), (several, 390), (several, 2200)):
                for dark in (False, True):
                    await tab.open(page.as_uri(), width=width)
                    await tab.until("document.readyState == 'complete'")
                    picture = tmp_path / f"{page.name}-{width}-{dark}.png"
                    await tab.screenshot(picture, dark=dark)
                    assert await tab.evaluate("document.documentElement.scrollWidth") == width
                    assert await tab.evaluate(CONTRAST) >= 4.5  # WCAG 2.2, 1.4.3
                    assert picture.stat().st_size > 10_000
                for share, value in (("1", "step 40; sampled: 10"), ("0", "step 0; held out")):
                    hidden, is_inside, shown = await tab.evaluate(POINT.replace("SHARE", share))
                    assert not hidden
                    assert is_inside
                    if page == alone:
                        assert shown.startswith(value)
            assert tab.errors == []

    asyncio.run(look())
