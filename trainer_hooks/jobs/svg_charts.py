"""Charts as SVG text, for pages that need no other file."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence

Point = tuple[float, float]

COLOURS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#8c564b", "#17becf", "#7f7f7f")
_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _TOP = 400, 220, 48, 22, 22


def line_chart(series: Mapping[str, Sequence[Point]]) -> str:
    """Lines over a common x axis; each has at least one point. A few points are drawn as dots."""
    points = [point for line in series.values() for point in line]
    xs, ys = [x for x, _ in points], [y for _, y in points]
    frame = _Frame(min(xs), max(xs), min(ys), max(ys))
    parts = []
    for i, (_, line) in enumerate(series.items()):
        colour = COLOURS[i % len(COLOURS)]
        placed = [frame.place(point) for point in line]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in placed)
        parts.append(
            f"<polyline points='{path}' fill='none' stroke='{colour}' stroke-width='1.5'/>"
        )
        if len(placed) <= 20:
            parts += [
                f"<circle cx='{x:.1f}' cy='{y:.1f}' r='3' fill='{colour}'/>" for x, y in placed
            ]
    return _svg([*frame.axes(), *parts, *_legend(list(series))])


def stacked_chart(xs: Sequence[float], shares: Mapping[str, Sequence[float]]) -> str:
    """Shares that sum to 1, one upon the other."""
    if not xs or not shares:
        return _svg([f"<text x='{_LEFT}' y='{_HEIGHT / 2}'>nothing recorded</text>"])
    frame = _Frame(xs[0], xs[-1], 0.0, 1.0)
    base, parts = [0.0] * len(xs), []
    for i, values in enumerate(shares.values()):
        top = [low + value for low, value in zip(base, values, strict=True)]
        upper = [frame.place(point) for point in zip(xs, top, strict=True)]
        lower = [frame.place(point) for point in zip(xs, base, strict=True)]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in [*upper, *reversed(lower)])
        parts.append(f"<polygon points='{path}' fill='{COLOURS[i % len(COLOURS)]}'/>")
        base = top
    return _svg([*frame.axes(), *parts, *_legend(list(shares))])


class _Frame:
    """From values to places in the picture."""

    def __init__(self, x_low: float, x_high: float, y_low: float, y_high: float) -> None:
        self._x_low, self._x_span = x_low, (x_high - x_low) or 1.0
        self._y_low, self._y_span = y_low, (y_high - y_low) or 1.0
        self._x_high, self._y_high = x_high, y_high

    def place(self, point: Point) -> Point:
        width, height = _WIDTH - _LEFT - 8, _HEIGHT - _BOTTOM - _TOP
        x = _LEFT + (point[0] - self._x_low) / self._x_span * width
        return x, _TOP + (1.0 - (point[1] - self._y_low) / self._y_span) * height

    def axes(self) -> list[str]:
        bottom, right = _HEIGHT - _BOTTOM, _WIDTH - 8
        line = "stroke='#ccc' stroke-width='1'"
        high, low = _number(self._y_high), _number(self._y_low)
        return [
            f"<line x1='{_LEFT}' y1='{bottom}' x2='{right}' y2='{bottom}' {line}/>",
            f"<line x1='{_LEFT}' y1='{_TOP}' x2='{_LEFT}' y2='{bottom}' {line}/>",
            f"<text x='{_LEFT - 4}' y='{_TOP + 4}' text-anchor='end'>{high}</text>",
            f"<text x='{_LEFT - 4}' y='{bottom}' text-anchor='end'>{low}</text>",
            f"<text x='{_LEFT}' y='{_HEIGHT - 6}'>{self._x_low:g}</text>",
            f"<text x='{right}' y='{_HEIGHT - 6}' text-anchor='end'>{self._x_high:g}</text>",
        ]


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _legend(names: Sequence[str]) -> list[str]:
    parts, x = [], float(_LEFT)
    for i, name in enumerate(names):
        colour = COLOURS[i % len(COLOURS)]
        parts.append(f"<rect x='{x}' y='4' width='9' height='9' fill='{colour}'/>")
        parts.append(f"<text x='{x + 12}' y='12'>{html.escape(name)}</text>")
        x += 20 + 6.2 * len(name)
    return parts


def _svg(parts: Sequence[str]) -> str:
    head = f"<svg viewBox='0 0 {_WIDTH} {_HEIGHT}' xmlns='http://www.w3.org/2000/svg' "
    return head + "font-family='sans-serif' font-size='11' fill='#333'>" + "".join(parts) + "</svg>"
