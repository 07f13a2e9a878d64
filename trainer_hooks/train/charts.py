"""Charts of text characters for a terminal: curves, histograms, bars of shares, tables of engines.

Used by `trainer_hooks.train.dashboard`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from itertools import pairwise

from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from rollout.control.reports import EngineStats
from rollout.control.state import EngineState
from trainer_hooks.metrics.histogram import NUM_BINS

_EIGHTHS = " ▁▂▃▄▅▆▇█"
_RATE_WINDOW = 8  # most reports of an engine from which its rate is computed
_KV_BAR_WIDTH = 10
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
_GAP = "   "


def curve_lines(values: Sequence[float], width: int, height: int) -> list[str]:
    """Return `values` as `height` lines of block characters, `width` cells wide, with a scale.

    If there are more values than cells, a cell shows a mean. If there are fewer, a value fills
    several cells.
    """
    cells = _resample(values, width)
    low, high = min(cells), max(cells)
    span = (high - low) or 1.0
    # The lowest value is drawn as an eighth of a cell.
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
        return [values[i * len(values) // width] for i in range(width)]
    edges = [round(i * len(values) / width) for i in range(width + 1)]
    parts = [values[start:end] for start, end in pairwise(edges)]
    return [sum(part) / len(part) for part in parts]


def histogram_table(counts: Mapping[int, int], num_lines: int) -> Table:
    """Return one line per bin with its value, a bar and its share. `counts` has the count of each
    bin. If there are more than `num_lines` bins, the last line counts all further bins."""
    table = Table.grid(expand=True, padding=(0, 1))
    table.add_column(justify="right")
    table.add_column(ratio=1)
    table.add_column(justify="right")
    bins = sorted(counts.items())
    if len(bins) > num_lines:
        rest = bins[num_lines - 1 :]
        bins = [*bins[: num_lines - 1], (rest[0][0], sum(count for _, count in rest))]
    is_open = len(bins) < len(counts) or bins[-1][0] == NUM_BINS
    total, largest = sum(counts.values()), max(count for _, count in bins)
    for value, count in bins:
        table.add_row(
            f"{value}+" if is_open and value == bins[-1][0] else str(value),
            ProgressBar(
                total=max(largest, 1), completed=count, complete_style="cyan", finished_style="cyan"
            ),
            f"{count / max(total, 1):.0%}",
        )
    return table


def share_bar(shares: Mapping[str, float], width: int, least: float = 0.005) -> RenderableType:
    """Return a bar of `width` cells with a legend. It shows shares of `least` or more, largest
    first."""
    present = [(name, share) for name, share in shares.items() if share >= least]
    ordered = sorted(present, key=lambda item: -item[1])
    bar, pieces = Text(no_wrap=True, overflow="crop"), []
    counts = _cell_counts([share for _, share in ordered], width)
    for (name, share), num_cells in zip(ordered, counts, strict=True):
        style = _SHARE_STYLES.get(name, _OTHER_STYLE)
        bar.append("█" * num_cells, style=style)
        pieces.append(Text.assemble(("■ ", style), f"{name} {share:.0%}"))
    return Group(bar, flowed(pieces, width))


def flowed(pieces: Sequence[Text], width: int) -> Text:
    """Return the texts with three spaces between them, in lines of up to `width` cells. No text is
    broken."""
    lines: list[Text] = []
    for piece in pieces:
        if lines and lines[-1].cell_len + len(_GAP) + piece.cell_len <= width:
            lines[-1].append(_GAP).append_text(piece)
        else:
            lines.append(piece.copy())
    return Text("\n").join(lines)


def _cell_counts(shares: Sequence[float], width: int) -> list[int]:
    """Return the number of cells of each share, rounded so that their sum is right."""
    counts, running, drawn = [], 0.0, 0
    for share in shares:
        running += share
        counts.append(round(running * width) - drawn)
        drawn += counts[-1]
    return counts


class EngineRates:
    """Computes the tokens per second of each engine from its latest reports."""

    def __init__(self) -> None:
        self._reports: dict[str, deque[tuple[float, int]]] = {}

    def add(self, name: str, stats: EngineStats, now_s: float) -> None:
        """Record one report of engine `name`. Earlier reports of a restarted engine are dropped."""
        reports = self._reports.setdefault(name, deque(maxlen=_RATE_WINDOW))
        if reports and reports[-1][1] > stats.num_sampled_tokens:
            reports.clear()
        reports.append((now_s, stats.num_sampled_tokens))

    def tokens_per_s(self, name: str) -> float | None:
        """Return the sampled tokens per second of an engine, or None before its second report."""
        reports = self._reports.get(name)
        if not reports or reports[-1][0] == reports[0][0]:
            return None
        (start_s, before), (end_s, after) = reports[0], reports[-1]
        return (after - before) / (end_s - start_s)


def engine_table(
    engines: Mapping[str, EngineStats], rates: EngineRates, num_lines: int | None = None
) -> Table:
    """Return one line per engine with its state, requests, use of the KV cache, and rate. If
    `num_lines` is given, a last line counts the engines that are not shown."""
    table = Table(box=None, padding=(0, 1), pad_edge=False)
    for column in ("engine", "state", "requests", "waiting", "KV cache", "tokens/s", "version"):
        is_text = column in ("engine", "state", "KV cache")
        table.add_column(column, justify="left" if is_text else "right", no_wrap=True)
    for name, stats in list(engines.items())[:num_lines]:
        is_running = stats.state is EngineState.RUNNING
        rate = rates.tokens_per_s(name) if is_running else None
        table.add_row(
            name,
            Text(stats.state.value, style="green" if is_running else "yellow"),
            f"{stats.num_running + stats.num_paused:,}",
            f"{stats.num_waiting:,}",
            _kv_bar(stats),
            "-" if rate is None else f"{rate:,.0f}",
            str(stats.weights_version),
        )
    if num_lines is not None and len(engines) > num_lines:
        table.add_row(f"and {len(engines) - num_lines:,} more", style="dim")
    return table


def _kv_bar(stats: EngineStats) -> Text:
    share = stats.num_blocks_used / max(stats.num_blocks_total, 1)
    num_cells = min(round(share * _KV_BAR_WIDTH), _KV_BAR_WIDTH)
    bar = Text("█" * num_cells, style="cyan")
    bar.append("░" * (_KV_BAR_WIDTH - num_cells), style="dim")
    return bar.append(f" {share:4.0%}", style="default")
