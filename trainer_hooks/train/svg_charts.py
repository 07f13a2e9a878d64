"""SVG charts with legends, for HTML pages without other files.

Used by `trainer_hooks.train.report`. The page includes `STYLE`, which gives the charts' classes
their colours in a light and a dark scheme.
"""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from itertools import pairwise

Point = tuple[float, float]

# Both schemes: 3 to 1 or more against the background (WCAG 2.2, 1.4.11).
_LIGHT = ("#1f6fb2", "#c8372d", "#2a7f2a", "#7d4fb0", "#b85c00", "#8c564b", "#0f7f8c", "#6b6b6b")
_DARK = ("#6cb2ee", "#f08a80", "#74c274", "#bf9be8", "#f0a04c", "#c99a8e", "#57c3d0", "#a8a8a8")
NUM_COLOURS = len(_LIGHT)
_MAX_POINTS = 300  # more points are drawn as means over bins, with the range of each bin
_MAX_DOTS, _MAX_RANGES = 40, 3
_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _TOP, _RIGHT = 420, 210, 50, 24, 8, 12


def _colours(values: Sequence[str]) -> str:
    return " ".join(f"--series{i}: {value};" for i, value in enumerate(values))


STYLE = f"""
:root {{ {_colours(_LIGHT)} }}
@media (prefers-color-scheme: dark) {{ :root {{ {_colours(_DARK)} }} }}
svg {{ width: 100%; height: auto; display: block; font: 11px system-ui, sans-serif; }}
svg text {{ fill: currentColor; }} svg .grid {{ stroke: currentColor; stroke-opacity: .18; }}
svg .line {{ fill: none; stroke-width: 1.6; }} svg .range {{ fill-opacity: .22; }}
svg .again {{ stroke-dasharray: 5 3; }}
.legend {{ display: flex; flex-wrap: wrap; gap: 0 .9rem; margin: 0; padding: 0; list-style: none; }}
.legend i {{ display: inline-block; width: .7em; height: .7em; margin-right: .35em; }}
.legend .hollow {{ clip-path: polygon(0 0, 40% 0, 40% 100%, 60% 100%, 60% 0, 100% 0,
  100% 100%, 0 100%); }}
""" + "".join(
    f".stroke{i} {{ stroke: var(--series{i}); }} .fill{i} {{ fill: var(--series{i}); }} "
    f".box{i} {{ background: var(--series{i}); }}\n"
    for i in range(NUM_COLOURS)
)


def legend(names: Sequence[str]) -> str:
    """Return an HTML list of the series' names and colours, in the chart's order."""
    items = (
        f'<li><i class="box{i % NUM_COLOURS}{" hollow" if i >= NUM_COLOURS else ""}"></i>'
        f"{html.escape(name)}</li>"
        for i, name in enumerate(names)
    )
    return f'<ul class="legend">{"".join(items)}</ul>'


def line_chart(series: Mapping[str, Sequence[Point]]) -> str:
    """Return an SVG picture of lines over a common x axis. `series`: points of each line, by name.

    Each line needs at least one point. Lines of few points get dots.
    """
    points = [point for line in series.values() for point in line]
    xs, ys = [x for x, _ in points], [y for _, y in points]
    low, high = _without_outliers(ys)
    frame = _Frame(min(xs), max(xs), low, high)
    parts = []
    if (low, high) != (min(ys), max(ys)):
        note = f"values from {_number(min(ys))} to {_number(max(ys))}"
        parts.append(f'<text x="{_WIDTH - _RIGHT}" y="{_TOP + 10}" text-anchor="end">{note}</text>')
    for i, line in enumerate(series.values()):
        colour, again = i % NUM_COLOURS, " again" if i >= NUM_COLOURS else ""
        bins = _binned(line)
        if len(line) > len(bins) and len(series) <= _MAX_RANGES:
            upper = [frame.place((x, high)) for x, _, _, high in bins]
            lower = [frame.place((x, low)) for x, _, low, _ in bins]
            shape = _path([*upper, *reversed(lower)])
            parts.append(f'<polygon class="range fill{colour}" points="{shape}"/>')
        placed = [frame.place((x, mean)) for x, mean, _, _ in bins]
        parts.append(f'<polyline class="line stroke{colour}{again}" points="{_path(placed)}"/>')
        if len(placed) <= _MAX_DOTS:
            parts += [
                f'<circle class="fill{colour}" cx="{x:.1f}" cy="{y:.1f}" r="2.5"/>'
                for x, y in placed
            ]
    last = ", ".join(f"{name} {_number(line[-1][1])}" for name, line in series.items())
    return _svg([*frame.axes(), *parts], f"last: {last}")


def stacked_chart(xs: Sequence[float], shares: Mapping[str, Sequence[float]]) -> str:
    """Return an SVG picture of shares stacked to a height of 1.

    `shares`: for each name, one share per x. The shares of an x add up to at most 1.
    """
    if not xs or not shares:
        return _svg([f'<text x="{_LEFT}" y="{_HEIGHT / 2}">nothing recorded</text>'], "nothing")
    edges, means = _stacked_bins(xs, list(shares.values()))
    frame = _Frame(edges[0], edges[-1], 0.0, 1.0)
    base, parts = [0.0] * (len(edges) - 1), []
    for i, values in enumerate(means):
        top = [low + value for low, value in zip(base, values, strict=True)]
        upper = [frame.place(corner) for corner in _stairs(edges, top)]
        lower = [frame.place(corner) for corner in _stairs(edges, base)]
        shape = _path([*upper, *reversed(lower)])
        parts.append(f'<polygon class="fill{i % NUM_COLOURS}" points="{shape}"/>')
        base = top
    last = ", ".join(f"{name} {values[-1]:.0%}" for name, values in shares.items())
    return _svg([*parts, *frame.axes()], f"last: {last}")


def _without_outliers(ys: Sequence[float]) -> tuple[float, float]:
    """Return the range of y to draw. Of 100 values or more, it leaves out a few far outside."""
    low, high = min(ys), max(ys)
    if len(ys) < 100:
        return low, high
    ordered = sorted(ys)
    first, last = ordered[len(ys) // 100], ordered[-1 - len(ys) // 100]
    margin = 5 * (last - first)
    if not margin:
        return low, high
    return max(low, first - margin), min(high, last + margin)


def _bounds(num_values: int) -> list[tuple[int, int]]:
    """Return the start and end of each bin of `num_values` values."""
    num_bins = min(num_values, _MAX_POINTS)
    return list(pairwise(i * num_values // num_bins for i in range(num_bins + 1)))


def _binned(line: Sequence[Point]) -> list[tuple[float, float, float, float]]:
    """Return (x, mean, lowest, highest) of each bin of points."""
    bins = []
    for start, end in _bounds(len(line)):
        ys = [y for _, y in line[start:end]]
        x = sum(x for x, _ in line[start:end]) / len(ys)
        bins.append((x, math.fsum(ys) / len(ys), min(ys), max(ys)))
    return bins


def _stacked_bins(
    xs: Sequence[float], columns: Sequence[Sequence[float]]
) -> tuple[list[float], list[list[float]]]:
    """Return the edges of the bins, and each column's means over them."""
    bounds = _bounds(len(xs))
    edges = [xs[0] - 0.5, *((xs[end - 1] + xs[end]) / 2 for _, end in bounds[:-1]), xs[-1] + 0.5]
    means = [[math.fsum(own[a:b]) / (b - a) for a, b in bounds] for own in columns]
    return edges, means


def _stairs(edges: Sequence[float], values: Sequence[float]) -> list[Point]:
    return [(x, value) for sides, value in zip(pairwise(edges), values, strict=True) for x in sides]


class _Frame:
    """Maps values to coordinates of the picture; values outside the range are drawn at its edge."""

    def __init__(self, x_low: float, x_high: float, y_low: float, y_high: float) -> None:
        self._x_low, self._x_high = x_low, x_high if x_high > x_low else x_low + 1.0
        if y_high == y_low:  # a flat line is drawn in the middle
            y_low, y_high = y_low - (abs(y_low) or 1.0) / 2, y_high + (abs(y_high) or 1.0) / 2
        self._y_low, self._y_high, self._y_span = y_low, y_high, y_high - y_low

    def place(self, point: Point) -> Point:
        width, height = _WIDTH - _LEFT - _RIGHT, _HEIGHT - _BOTTOM - _TOP
        x = (point[0] - self._x_low) / (self._x_high - self._x_low)
        y = (min(max(point[1], self._y_low), self._y_high) - self._y_low) / self._y_span
        return _LEFT + x * width, _TOP + (1.0 - y) * height

    def axes(self) -> list[str]:
        parts = []
        for value in ticks(self._y_low, self._y_high):
            _, y = self.place((self._x_low, value))
            parts.append(f'<path class="grid" d="M{_LEFT} {y:.1f}H{_WIDTH - _RIGHT}"/>')
            label = f'<text x="{_LEFT - 5}" y="{y + 4:.1f}" text-anchor="end">'
            parts.append(f"{label}{_number(value)}</text>")
        for value in ticks(self._x_low, self._x_high):
            x, _ = self.place((value, self._y_low))
            if value == round(value):  # there is no half step
                anchor = "end" if x > _WIDTH - 2 * _RIGHT else "middle"
                place = f'x="{x:.1f}" y="{_HEIGHT - 6}" text-anchor="{anchor}"'
                parts.append(f"<text {place}>{value:,.0f}</text>")
        return parts


def ticks(low: float, high: float) -> list[float]:
    """Return two to seven multiples of 1, 2 or 5 times a power of ten, from `low` to `high`."""
    rough = (high - low) / 6
    unit = 10.0 ** math.floor(math.log10(rough))
    step = next(unit * m for m in (1, 2, 5, 10) if unit * m >= rough * 0.999)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [round(i * step, 12) for i in range(first, last + 1)]


def _number(value: float) -> str:
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e6 else f"{value:.3g}"


def _path(points: Sequence[Point]) -> str:
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in points)


def _svg(parts: Sequence[str], label: str) -> str:
    head = f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{html.escape(label)}">'
    return head + "".join(parts) + "</svg>"
