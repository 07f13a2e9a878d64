"""Figures for papers, drawn by matplotlib: `rollout report RUN --figure FILE`."""

from __future__ import annotations

import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from rollout.errors import ConfigError
from tests.installed import needs
from trainer_hooks.train.plots import write_figure
from trainer_hooks.train.run_results import RunResults, SeedResults


def run_of(name: str, *gains: float) -> RunResults:
    """Return a run with a seed for each gain of the reward per step."""
    seeds = []
    for i, gain in enumerate(gains):
        rows = [{"trainer/step": step, "reward": step * gain} for step in range(1, 5)]
        evaluation = {"trainer/step": 4, "eval/greedy_reward": gain, "eval/num_prompts": 64}
        seeds.append(SeedResults(Path(f"seed_{i}"), [*rows, evaluation]))
    return RunResults(name, seeds)


def texts(path: Path) -> set[str]:
    """Return the texts of an SVG figure, which matplotlib names in comments."""
    parser = ElementTree.XMLParser(target=ElementTree.TreeBuilder(insert_comments=True))
    root = ElementTree.parse(path, parser).getroot()
    return {(each.text or "").strip() for each in root.iter(ElementTree.Comment)}


def num_bands(path: Path) -> int:
    return path.read_text().count('id="FillBetweenPolyCollection') or path.read_text().count(
        'id="PolyCollection'
    )


@needs("matplotlib")
def test_write_figure_of_a_run_has_the_reward_with_bands_and_no_title(tmp_path: Path) -> None:
    path = write_figure([run_of("sums", 0.1, 0.3)], tmp_path / "reward.svg")
    shown = texts(path)
    assert {"step", "reward", "sampled", "held out, greedy (n=64)"} <= shown
    assert "mean of 2 seeds; band: lowest to highest" in shown
    assert num_bands(path) == 2
    again = write_figure([run_of("sums", 0.1, 0.3)], tmp_path / "again.svg")
    assert again.read_bytes() == path.read_bytes()
    titled = write_figure([run_of("sums", 0.1)], tmp_path / "titled.svg", title="Sums of two")
    assert "Sums of two" in texts(titled)
    assert num_bands(titled) == 0


@needs("matplotlib")
def test_write_figure_of_several_runs_names_them_in_the_legend(tmp_path: Path) -> None:
    runs = [run_of("first", 0.1, 0.3), run_of("second", 0.5)]
    shown = texts(write_figure(runs, tmp_path / "a.svg"))
    assert {"first, 2 seeds", "second", "reward, sampled"} <= shown
    assert "mean of seeds; band: lowest to highest" in shown
    shown = texts(write_figure(runs, tmp_path / "b.svg", ["eval/greedy_reward"]))
    assert "reward, held out, greedy (n=64)" in shown


@needs("matplotlib")
def test_write_figure_writes_pdf_with_text_as_text_and_png(tmp_path: Path) -> None:
    pdf = write_figure([run_of("sums", 0.1)], tmp_path / "new" / "reward.pdf").read_bytes()
    assert pdf.startswith(b"%PDF-")
    assert b"/Type3" not in pdf
    png = write_figure([run_of("sums", 0.1)], tmp_path / "reward.png").read_bytes()
    assert png.startswith(b"\x89PNG")


def test_write_figure_without_matplotlib_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError, match="needs the package matplotlib: pip install matplotlib"):
        write_figure([run_of("sums", 0.1)], tmp_path / "reward.pdf")
    assert not list(tmp_path.iterdir())
