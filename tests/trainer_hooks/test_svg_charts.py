"""The SVG charts of reports: axes, bands and bins."""

from __future__ import annotations

import json
import re
from xml.etree import ElementTree

import pytest

from trainer_hooks.train.svg_charts import (
    Point,
    bar_chart,
    line_chart,
    stacked_chart,
    tick_labels,
    ticks,
)


def points(*values: float) -> list[Point]:
    return [Point.mean(step, [value]) for step, value in enumerate(values, start=1)]


def labels(chart: str) -> list[str]:
    """Return the texts of a chart beside the word "step": its axis labels."""
    return re.findall(r"<text[^>]*>([^<]*)</text>", chart.replace("step", ""))


def test_line_chart_names_a_spike_instead_of_flattening_the_curve() -> None:
    line = [1.0 + step % 7 for step in range(500)]
    assert "values from 1 to 1e+12" in line_chart({"norm": points(*line, 1e12)})
    assert "values from" not in line_chart({"norm": points(*line)})


def test_line_chart_draws_one_step_and_a_flat_line() -> None:
    assert 'points="54.0' in stacked_chart([3.0], {"train": [0.5], "wait": [0.5]})
    assert "<circle" in line_chart({"reward": points(0.0)})
    assert "nothing recorded" in stacked_chart([], {})


@pytest.mark.parametrize(
    "values",
    [
        (0.9999999, 1.0),
        (1.0, 1.0, 1.0),
        (1.0000001, 1.0000002),
        (0.999, 1.001),
        (1234567.0, 1234568.0),
        (2e-6, 1e-5),
        (-3e-9, 1e-8),
        (0.0, 4e5),
    ],
)
def test_line_chart_repeats_no_tick_label(values: tuple[float, ...]) -> None:
    chart = line_chart({"value": points(*values)})
    on_axes = [label for label in labels(chart) if label]
    y_labels, x_labels = on_axes[: -len(values)], on_axes[-len(values) :]
    assert x_labels == [str(step) for step in range(1, len(values) + 1)]
    assert y_labels
    assert len(set(y_labels)) == len(y_labels)
    assert max(map(len, y_labels)) <= 9


def test_line_chart_bins_many_points_and_keeps_their_range() -> None:
    sparse = [Point.mean(step, [5.0]) for step in (0, 5_000, 10_000)]
    chart = line_chart({"reward": points(*([0.0, 1.0] * 5_000)), "held out": sparse})
    shown = json.loads(ElementTree.fromstring(chart).attrib["data-values"])
    assert len(shown["x"]) == 300
    assert shown["x"][1] == "steps 33 to 65"
    (_, _, reward), (_, _, held_out) = shown["lines"]
    assert reward[1].endswith("(0 to 1)")
    assert [text for text in held_out if text] == ["5"] * 3
    assert 'class="range fill0"' in chart


def test_line_chart_keeps_the_colour_of_a_line_without_points() -> None:
    chart = line_chart({"first": [], "second": points(1.0, 2.0)})
    assert "stroke1" in chart
    assert "stroke0" not in chart


def test_bar_chart_draws_a_bar_per_series_and_leaves_out_labels_without_room() -> None:
    bins = [(f"{n:,}", f"{n} tokens") for n in range(0, 16_000, 1_000)]
    chart = bar_chart(bins, {"a": [1 / 16] * 16, "b": [0.0] * 16})
    assert chart.count("<rect") == 32
    shown = [label for label in labels(chart) if label.endswith((",000", "0"))]
    assert "0" in shown
    assert len(shown) < 16


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [(0.0, 1.0, [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]), (-3.0, 12.0, [0.0, 5.0, 10.0])],
)
def test_ticks_are_round_numbers(low: float, high: float, expected: list[float]) -> None:
    assert ticks(low, high) == pytest.approx(expected)


def test_ticks_of_steps_are_whole_numbers() -> None:
    assert ticks(1, 3, smallest=1) == [1, 2, 3]
    assert tick_labels([0.0, 0.5, 1.0], is_share=True) == ["0%", "50%", "100%"]
