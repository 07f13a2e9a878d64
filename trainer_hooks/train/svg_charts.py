"""SVG charts with legends, for HTML pages that need no other files.

Used by `trainer_hooks.train.report` and `trainer_hooks.train.report_charts`.
`trainer_hooks.train.plots` uses the colours, and `trainer_hooks.train.run_results` uses Point. A
page includes STYLE, which colours the charts, and SCRIPT, which shows the values under the pointer.
"""

from __future__ import annotations

import html
import json
import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from statistics import fmean
from typing import NamedTuple

# The contrast with the background is at least 3 to 1 in both schemes (WCAG 2.2, 1.4.11).
LIGHT_COLOURS = (
    *("#1f6fb2", "#c8372d", "#2a7f2a", "#7d4fb0", "#b85c00", "#8c564b", "#0f7f8c", "#6b6b6b"),
)
_DARK_COLOURS = (
    *("#6cb2ee", "#f08a80", "#74c274", "#bf9be8", "#f0a04c", "#c99a8e", "#57c3d0", "#a8a8a8"),
)
NUM_COLOURS = len(LIGHT_COLOURS)
_MAX_POINTS = 300  # more points are drawn as means over bins, with the range of each bin
_MAX_DOTS = 40
MAX_BANDS = 4  # a chart with more lines has no bands
_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _TOP, _RIGHT = 420, 210, 54, 24, 8, 12
_SMALLEST_SPAN = 1e-3  # least range of the y axis, as a share of the largest value
_CHARACTER_WIDTH = 6.5  # approximate width of a character of a label


def _colours(values: Sequence[str]) -> str:
    return " ".join(f"--series{i}: {value};" for i, value in enumerate(values))


STYLE = f"""
:root {{ {_colours(LIGHT_COLOURS)} }}
@media (prefers-color-scheme: dark) {{ :root {{ {_colours(_DARK_COLOURS)} }} }}
svg {{ width: 100%; height: auto; display: block; font: 11px system-ui, sans-serif;
  touch-action: pan-y; }}
svg text {{ fill: currentColor; }} svg .grid {{ stroke: currentColor; stroke-opacity: .18; }}
svg .line {{ fill: none; stroke-width: 1.6; }} svg .range {{ fill-opacity: .22; }}
svg .again {{ stroke-dasharray: 5 3; }}
svg .pointed {{ stroke: currentColor; stroke-opacity: .55; pointer-events: none; }}
.legend {{ display: flex; flex-wrap: wrap; gap: 0 .9rem; margin: 0; padding: 0; list-style: none; }}
.legend i, .values i {{ display: inline-block; width: .7em; height: .7em; margin-right: .35em; }}
.hollow {{ clip-path: polygon(0 0, 40% 0, 40% 100%, 60% 100%, 60% 0, 100% 0, 100% 100%, 0 100%); }}
.values {{ position: absolute; z-index: 1; pointer-events: none; padding: .3rem .5rem;
  border: 1px solid var(--rule); border-radius: 4px; background: var(--page); color: var(--text);
  font-size: .8rem; line-height: 1.35; max-width: 18rem; font-variant-numeric: tabular-nums; }}
.values b {{ display: block; }}
""" + "".join(
    f".stroke{i} {{ stroke: var(--series{i}); }} .fill{i} {{ fill: var(--series{i}); }} "
    f".box{i} {{ background: var(--series{i}); }}\n"
    for i in range(NUM_COLOURS)
)

# The attribute `data-values` of a chart has x (a label per position), at (x coordinate of each
# position), and lines. A line has a name, the class of its colour, and a text or null per position.
SCRIPT = f"""<script>//<![CDATA[
const box = document.createElement("div");
box.className = "values"; box.hidden = true; document.body.append(box);
for (const svg of document.querySelectorAll("svg[data-values]")) {{
  const chart = JSON.parse(svg.dataset.values);
  const mark = document.createElementNS(svg.namespaceURI, "path");
  mark.setAttribute("class", "pointed");
  const hide = () => {{ mark.remove(); box.hidden = true; }};
  const show = event => {{
    const area = svg.getBoundingClientRect();
    const x = (event.clientX - area.left) * {_WIDTH} / area.width;
    let near = 0;
    chart.at.forEach((at, i) => {{
      if (Math.abs(at - x) < Math.abs(chart.at[near] - x)) near = i; }});
    mark.setAttribute("d", `M${{chart.at[near]}} {_TOP}V{_HEIGHT - _BOTTOM}`); svg.append(mark);
    const title = document.createElement("b");
    title.textContent = chart.x[near];
    box.replaceChildren(title);
    for (const [name, colour, texts] of chart.lines) {{
      if (texts[near] === null) continue;
      const line = document.createElement("div"), key = document.createElement("i");
      key.className = colour;
      line.append(key, `${{name}}: ${{texts[near]}}`); box.append(line);
    }}
    box.hidden = false;
    const left = area.left + chart.at[near] * area.width / {_WIDTH};
    const room = document.documentElement.clientWidth - box.offsetWidth - 4;
    const isLeft = left + 12 > room;
    box.style.left = Math.max(4, isLeft ? left - 12 - box.offsetWidth : left + 12)
      + window.scrollX + "px";
    const above = Math.max(area.top, event.clientY - box.offsetHeight - 12);
    const isWide = document.documentElement.clientWidth >= 600;
    box.style.top = (isWide ? above : area.bottom) + window.scrollY + "px";
  }};
  svg.addEventListener("pointermove", show); svg.addEventListener("pointerdown", show);
  svg.addEventListener("pointerleave", hide);
}}
//]]></script>"""


class Point(NamedTuple):
    """A point of a line at `x`: the mean `y` of one or more values, and their range."""

    x: float
    y: float
    low: float
    high: float

    @classmethod
    def mean(cls, x: float, values: Sequence[float]) -> Point:
        return cls(x, fmean(values), min(values), max(values))


def legend(names: Sequence[str], note: str = "") -> str:
    """Return an HTML list of the series' names and colours in the chart's order, and a note."""
    items = [
        f'<li><i class="{_box(i)}"></i>{html.escape(name)}</li>' for i, name in enumerate(names)
    ]
    if note:
        items.append(f'<li class="note">{html.escape(note)}</li>')
    return f'<ul class="legend">{"".join(items)}</ul>'


def line_chart(lines: Mapping[str, Sequence[Point]]) -> str:
    """Return an SVG picture of lines over steps.

    `lines` has the points of each line by name, at least one point in all. A line without points is
    not drawn but keeps its colour. Up to MAX_BANDS lines have bands.
    """
    every = [point for line in lines.values() for point in line]
    lowest, highest = min(p.low for p in every), max(p.high for p in every)
    low, high = _without_outliers([y for p in every for y in (p.low, p.high)])
    frame = _Frame(min(p.x for p in every), max(p.x for p in every), low, high)
    parts = []
    if (low, high) != (lowest, highest):
        note = f"values from {_number(lowest)} to {_number(highest)}"
        parts.append(f'<text x="{_WIDTH - _RIGHT}" y="{_TOP + 10}" text-anchor="end">{note}</text>')
    spans, binned = _binned(list(lines.values()))
    xs = [(start + end) / 2 for start, end in spans]
    for i, line in enumerate(binned):
        parts += _line(i, [p for p in line if p is not None], frame, len(lines) <= MAX_BANDS)
    texts = [[None if p is None else _shown(p) for p in line] for line in binned]
    heads = [steps_text(start, end) for start, end in spans]
    at = [frame.place(x, low)[0] for x in xs]
    last = ", ".join(f"{name} {_number(line[-1].y)}" for name, line in lines.items() if line)
    return _svg([*frame.axes("step"), *parts], f"last: {last}", _values(heads, at, lines, texts))


def _line(i: int, line: Sequence[Point], frame: _Frame, has_band: bool) -> list[str]:
    """Return the SVG elements of line `i`: its band if `has_band`, the line, and the dots of a
    short line."""
    colour, again = i % NUM_COLOURS, " again" if i >= NUM_COLOURS else ""
    parts = []
    if has_band and any(p.low < p.high for p in line):
        upper = [frame.place(p.x, p.high) for p in line]
        lower = [frame.place(p.x, p.low) for p in reversed(line)]
        parts.append(f'<polygon class="range fill{colour}" points="{_path([*upper, *lower])}"/>')
    placed = [frame.place(p.x, p.y) for p in line]
    if len(placed) > 1:
        parts.append(f'<polyline class="line stroke{colour}{again}" points="{_path(placed)}"/>')
    if len(placed) <= _MAX_DOTS:
        parts += [
            f'<circle class="fill{colour}" cx="{x:.1f}" cy="{y:.1f}" r="2.5"/>' for x, y in placed
        ]
    return parts


def stacked_chart(xs: Sequence[float], shares: Mapping[str, Sequence[float]]) -> str:
    """Return an SVG picture of shares over steps, stacked to a height of 1. `shares` has one share
    per x for each name. The shares of an x add up to at most 1."""
    if not xs or not shares:
        return _svg([f'<text x="{_LEFT}" y="{_HEIGHT / 2}">nothing recorded</text>'], "nothing")
    bounds = _bounds(len(xs))
    edges = [xs[0] - 0.5, *((xs[end - 1] + xs[end]) / 2 for _, end in bounds[:-1]), xs[-1] + 0.5]
    means = [[fmean(own[start:end]) for start, end in bounds] for own in shares.values()]
    frame = _Frame(edges[0], edges[-1], 0.0, 1.0, is_share=True)
    base, parts = [0.0] * len(bounds), []
    for i, values in enumerate(means):
        top = [low + value for low, value in zip(base, values, strict=True)]
        upper = [frame.place(*corner) for corner in _stairs(edges, top)]
        lower = [frame.place(*corner) for corner in _stairs(edges, base)]
        shape = _path([*upper, *reversed(lower)])
        parts.append(f'<polygon class="fill{i % NUM_COLOURS}" points="{shape}"/>')
        base = top
    heads = [steps_text(xs[start], xs[end - 1]) for start, end in bounds]
    at = [frame.place((left + right) / 2, 0.0)[0] for left, right in pairwise(edges)]
    texts = [[f"{value:.1%}" if value else None for value in values] for values in means]
    last = ", ".join(f"{name} {values[-1]:.0%}" for name, values in shares.items())
    shown = _values(heads, at, shares, texts)
    return _svg([*parts, *frame.axes("step")], f"last: {last}", shown)


def bar_chart(bins: Sequence[tuple[str, str]], shares: Mapping[str, Sequence[float]]) -> str:
    """Return an SVG picture of shares as bars, which stand side by side in each bin.

    `bins`: at least one pair of a label below the axis and a name beside the values.
    `shares`: for each series, one share per bin.
    """
    highest = max((share for own in shares.values() for share in own), default=0.0)
    frame = _Frame(0.0, len(bins), 0.0, highest or 1.0, is_share=True)
    parts = []
    for i, own in enumerate(shares.values()):
        for j, share in enumerate(own):
            width = 0.84 / len(shares)
            left, top = frame.place(j + 0.08 + i * width, share)
            right, bottom = frame.place(j + 0.08 + (i + 1) * width, 0.0)
            size = f'width="{right - left:.1f}" height="{bottom - top:.1f}"'
            kind = f"fill{i % NUM_COLOURS}"
            parts.append(f'<rect class="{kind}" x="{left:.1f}" y="{top:.1f}" {size}/>')
    at = [frame.place(j + 0.5, 0.0)[0] for j in range(len(bins))]
    widest = max(len(label) for label, _ in bins) * _CHARACTER_WIDTH + 6
    every = math.ceil(widest / (at[1] - at[0])) if len(at) > 1 else 1
    for x, (label, _) in list(zip(at, bins, strict=True))[::every]:
        place = f'x="{x:.1f}" y="{_HEIGHT - 6}" text-anchor="middle"'
        parts.append(f"<text {place}>{html.escape(label)}</text>")
    texts = [[f"{share:.1%}" for share in own] for own in shares.values()]
    heads = [name for _, name in bins]
    label = "; ".join(
        f"{name}: {', '.join(map(' '.join, zip(heads, own, strict=True)))}"
        for name, own in zip(shares, texts, strict=True)
    )
    return _svg([*frame.axes(), *parts], label, _values(heads, at, shares, texts))


def _without_outliers(ys: Sequence[float]) -> tuple[float, float]:
    """Return the range of y to draw. For 200 values or more, it excludes a few values far
    outside."""
    low, high = min(ys), max(ys)
    if len(ys) < 200:
        return low, high
    ordered = sorted(ys)
    first, last = ordered[len(ys) // 100], ordered[-1 - len(ys) // 100]
    margin = 5 * (last - first)
    if not margin:
        return low, high
    return max(low, first - margin), min(high, last + margin)


def _bounds(num_values: int) -> list[tuple[int, int]]:
    num_bins = min(num_values, _MAX_POINTS)
    return list(pairwise(i * num_values // num_bins for i in range(num_bins + 1)))


def _binned(
    lines: Sequence[Sequence[Point]],
) -> tuple[list[tuple[float, float]], list[list[Point | None]]]:
    """Return the first and last x of each bin, and each line's mean point in each bin, or None."""
    # All lines share the bins, so that SCRIPT can show the values at one place together.
    xs = sorted({point.x for line in lines for point in line})
    spans = [(xs[start], xs[end - 1]) for start, end in _bounds(len(xs))]
    bin_of = {x: i for i, (start, end) in enumerate(_bounds(len(xs))) for x in xs[start:end]}
    binned: list[list[Point | None]] = []
    for line in lines:
        parts: list[list[Point]] = [[] for _ in spans]
        for point in line:
            parts[bin_of[point.x]].append(point)
        binned.append([_mean_point(part) for part in parts])
    return spans, binned


def _mean_point(part: Sequence[Point]) -> Point | None:
    if not part:
        return None
    x, y = fmean(p.x for p in part), fmean(p.y for p in part)
    return Point(x, y, min(p.low for p in part), max(p.high for p in part))


def _stairs(edges: Sequence[float], values: Sequence[float]) -> list[tuple[float, float]]:
    return [(x, value) for sides, value in zip(pairwise(edges), values, strict=True) for x in sides]


class _Frame:
    """Maps values to coordinates of the picture. Values outside the range are drawn at its edge."""

    def __init__(
        self, x_low: float, x_high: float, y_low: float, y_high: float, *, is_share: bool = False
    ) -> None:
        if x_high == x_low:  # a single step is drawn in the middle
            x_low, x_high = x_low - 0.5, x_high + 0.5
        self._x_low, self._x_high = x_low, x_high
        smallest = _SMALLEST_SPAN * max(abs(y_low), abs(y_high))
        if y_high == y_low:  # a flat line is drawn in the middle
            smallest = abs(y_low) or 1.0
        if y_high - y_low < smallest:
            middle = (y_low + y_high) / 2
            y_low, y_high = middle - smallest / 2, middle + smallest / 2
        self._y_low, self._y_high, self._is_share = y_low, y_high, is_share

    def place(self, x: float, y: float) -> tuple[float, float]:
        width, height = _WIDTH - _LEFT - _RIGHT, _HEIGHT - _BOTTOM - _TOP
        right = (x - self._x_low) / (self._x_high - self._x_low)
        inside = min(max(y, self._y_low), self._y_high)
        up = (inside - self._y_low) / (self._y_high - self._y_low)
        return _LEFT + right * width, _TOP + (1.0 - up) * height

    def axes(self, x_name: str = "") -> list[str]:
        """Return grid lines with labels for y. If `x_name` is given, also return labels for whole
        x."""
        parts = []
        values = ticks(self._y_low, self._y_high)
        for value, label in zip(values, tick_labels(values, self._is_share), strict=True):
            _, y = self.place(self._x_low, value)
            parts.append(f'<path class="grid" d="M{_LEFT} {y:.1f}H{_WIDTH - _RIGHT}"/>')
            place = f'x="{_LEFT - 5}" y="{y + 4:.1f}" text-anchor="end"'
            parts.append(f"<text {place}>{label}</text>")
        if x_name:
            parts.append(f'<text x="2" y="{_HEIGHT - 6}">{x_name}</text>')
            for value in ticks(self._x_low, self._x_high, smallest=1.0):
                x, _ = self.place(value, self._y_low)
                anchor = "end" if x > _WIDTH - 2 * _RIGHT else "middle"
                place = f'x="{x:.1f}" y="{_HEIGHT - 6}" text-anchor="{anchor}"'
                parts.append(f"<text {place}>{value:,.0f}</text>")
        return parts


def ticks(low: float, high: float, smallest: float = 0.0) -> list[float]:
    """Return up to seven multiples of 1, 2 or 5 times a power of ten, from `low` to `high`.
    `smallest` is the least distance between two of them."""
    rough = max((high - low) / 6, smallest)
    unit = 10.0 ** math.floor(math.log10(rough) + 1e-9)
    step = next(unit * m for m in (1, 2, 5, 10) if unit * m >= rough * 0.999)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    decimals = max(12, 3 - math.floor(math.log10(step)))
    return [round(i * step, decimals) for i in range(first, last + 1)]


def tick_labels(values: Sequence[float], is_share: bool = False) -> list[str]:
    """Return the texts of evenly spaced tick values, each different from the others."""
    if len(values) < 2:
        return [f"{value:.0%}" if is_share else _number(value) for value in values]
    distance, largest = values[1] - values[0], max(map(abs, values))
    decimals = -math.floor(math.log10(distance) + 1e-9)
    if is_share:
        return [f"{value:.{max(decimals - 2, 0)}%}" for value in values]
    if decimals <= 5 and largest < 1e6:
        return [f"{value:,.{max(decimals, 0)}f}" for value in values]
    if 1e6 <= largest < 1e9 and decimals > -9:
        return [f"{value / 1e6:.{max(decimals + 6, 0)}f}M" for value in values]
    digits = decimals + math.floor(math.log10(largest)) + 1
    return [f"{value:.{digits}g}" for value in values]


def _number(value: float) -> str:
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e6 else f"{value:.4g}"


def _shown(point: Point) -> str:
    text = _number(point.y)
    if point.low == point.high:
        return text
    return f"{text} ({_number(point.low)} to {_number(point.high)})"


def steps_text(start: float, end: float) -> str:
    """Return text such as "step 7" or "steps 7 to 9"."""
    return f"step {start:,.0f}" if start == end else f"steps {start:,.0f} to {end:,.0f}"


def _box(i: int) -> str:
    return f"box{i % NUM_COLOURS}{' hollow' if i >= NUM_COLOURS else ''}"


def _values(
    heads: Sequence[str],
    at: Sequence[float],
    names: Mapping[str, object],
    texts: Sequence[Sequence[str | None]],
) -> str:
    """Return the chart's values by position, as the JSON that SCRIPT reads."""
    lines = [[name, _box(i), own] for i, (name, own) in enumerate(zip(names, texts, strict=True))]
    chart = {"x": heads, "at": [round(x, 1) for x in at], "lines": lines}
    return json.dumps(chart, separators=(",", ":"))


def _path(points: Sequence[tuple[float, float]]) -> str:
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in points)


def _svg(parts: Sequence[str], label: str, values: str = "") -> str:
    # The attribute has single quotes, because JSON has many double quotes.
    shown = html.escape(values, quote=False).replace("'", "&#39;")
    data = f" data-values='{shown}'" if values else ""
    head = f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{html.escape(label)}"'
    return f"{head}{data}>{''.join(parts)}</svg>"
