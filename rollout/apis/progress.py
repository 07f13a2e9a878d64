"""The progress bar of LLM.generate. Used by `rollout.apis.llm`. It writes to the terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from rollout.telemetry import ObserverGuard


@contextmanager
def progress_bar(total: int) -> Iterator[Callable[[int], None]]:
    """Show a bar over `total` requests. Yields a function that advances the bar by a number of
    requests."""
    columns = (TextColumn("rollouts"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns) as bar:
        task, guard = bar.add_task("rollouts", total=total), ObserverGuard("the progress bar")
        yield lambda count: guard.call(bar.advance, task, count)
