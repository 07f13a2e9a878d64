"""Small charts of text cells: a curve, a histogram, a bar of shares."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from trainer_hooks.metrics.histogram import NUM_BINS

_EIGHTHS = " ▁▂▃▄▅▆▇█"
_SHARE_BAR_WIDTH = 72
_SHARE_STYLES = {
    "generate": "green",
    "train": "blue",
    "wait": "red",
    "update": "magenta",
    "suspend": "yellow",
    "resume": "bright_yellow",
    "reward": "cyan",
    "checkpoint": "bright_blue",
    "evaluate": "bright_green",
}
_OTHER_STYLE = "bright_black"


def curve_lines(values: Sequence[float], width: int, height: int) -> list[str]:
    """`values` as columns of eighths, `height` lines of up to `width` cells, with the scale.

    More values than cells: each cell is the mean of those it stands for.
    """
    cells = _resample(values, width)
    low, high = min(cells), max(cells)
    span = (high - low) or 1.0
    # The lowest value still shows an eighth, so that it is told from a missing one.
    levels = [1 + round((value - low) / span * (8 * height - 1)) for value in cells]
    lines = []
    for row in reversed(range(height)):
        bars = "".join(_EIGHTHS[min(max(level - 8 * row, 0), 8)] for level in levels)
        scale = high if row == height - 1 else low if row == 0 else None
        label = f"{scale:7.3f}" if scale is not None else " " * 7
        lines.append(f"{label} {bars}")
    return lines


def _resample(values: Sequence[float], width: int) -> list[float]:
    if len(values) <= width:
        return list(values)
    edges = [round(i * len(values) / width) for i in range(width + 1)]
    parts = [values[start:end] for start, end in pairwise(edges)]
    return [sum(part) / len(part) for part in parts]


def histogram_table(counts: Mapping[int, int]) -> Table:
    """One line per bin: its value, a bar, its share and its count."""
    table = Table.grid(expand=True, padding=(0, 1))
    table.add_column(justify="right")
    table.add_column(ratio=1)
    table.add_column(justify="right")
    total, largest = sum(counts.values()), max(counts.values())
    for value, count in sorted(counts.items()):
        table.add_row(
            f"{value}+" if value == NUM_BINS else str(value),
            ProgressBar(total=max(largest, 1), completed=count, complete_style="cyan"),
            f"{count / max(total, 1):.0%}",
        )
    return table


def share_bar(shares: Mapping[str, float]) -> RenderableType:
    """Shares side by side in one bar, and what each colour means; largest first."""
    present = [(name, share) for name, share in shares.items() if share >= 0.001]
    ordered = sorted(present, key=lambda item: -item[1])
    bar, legend = Text(no_wrap=True, overflow="crop"), Text()
    for (name, share), width in zip(ordered, _cell_counts([s for _, s in ordered]), strict=True):
        style = _SHARE_STYLES.get(name, _OTHER_STYLE)
        bar.append("█" * width, style=style)
        legend.append("■ ", style=style)
        legend.append(f"{name} {share:.1%}   ")
    return Group(bar, legend)


def _cell_counts(shares: Sequence[float]) -> list[int]:
    """Cells of each share, by rounding the running sum: they sum to the sum of all shares."""
    counts, running, drawn = [], 0.0, 0
    for share in shares:
        running += share
        counts.append(round(running * _SHARE_BAR_WIDTH) - drawn)
        drawn += counts[-1]
    return counts
