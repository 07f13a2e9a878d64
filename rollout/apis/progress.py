"""A live bar over finished requests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn


@contextmanager
def progress_bar(is_shown: bool, total: int) -> Iterator[Callable[[int], None]]:
    """Yields advance(count); draws nothing unless `is_shown`."""
    if not is_shown:
        yield lambda count: None
        return
    columns = (TextColumn("rollouts"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns) as bar:
        task = bar.add_task("rollouts", total=total)
        yield lambda count: bar.advance(task, count)
