"""The progress bar of `rollout generate`, drawn on stderr.

Used by `rollout.cli.generate` if the package rich is installed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn


@contextmanager
def progress_bar(num_prompts: int) -> Iterator[Callable[[int], None]]:
    """Show a bar over `num_prompts` prompts on stderr. Yields a function advance(num_tokens), which
    the caller calls for each finished prompt."""
    columns = (
        *(TextColumn("prompts"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()),
        TextColumn("{task.fields[rate]:,.0f} tokens/s"),
    )
    start, num_tokens = time.monotonic(), 0
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("prompts", total=num_prompts, rate=0.0)

        def advance(count: int) -> None:
            nonlocal num_tokens
            num_tokens += count
            bar.update(task, advance=1, rate=num_tokens / max(1e-9, time.monotonic() - start))

        yield advance
